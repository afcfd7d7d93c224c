"""Texts of a plan: rows for the record, tables and sentences for the reader.

Layers by name, many at a time: the same layer of every block is one line.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Sequence

from commlib.bench.results.table import Row, table_width
from commlib.planning.cost.choose import MARGIN

from .assumptions import Assumptions
from .model import LayeredModel, ModelLayer
from .schemes import BYTES, SCHEMES, SchemeOutcome, alone_s, crossover


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers of one shape whose names differ in their numbers only.

    Args:
        name: with ``*`` for what differs; the layer's own where there is only one.
        layers: in the order of the forward pass.
    """

    name: str
    layers: tuple[ModelLayer, ...]


def groups(layers: Sequence[ModelLayer]) -> list[Group]:
    """All layers, in the order in which each group's first comes."""
    found: dict[tuple[object, ...], list[ModelLayer]] = {}
    for x in layers:
        key = (_pattern(x.name), x.kind, x.parameters, x.flops, x.inputs, x.outputs, x.rows)
        found.setdefault(key, []).append(x)
    return [Group(_common([x.name for x in its]), tuple(its)) for its in found.values()]


def briefly(chosen: Collection[str], layers: Sequence[ModelLayer]) -> str:
    """Names of the chosen ones of these layers, a group at a time."""
    said = []
    for group in groups(layers):
        names = [x.name for x in group.layers if x.name in chosen]
        if len(names) == len(group.layers):
            said.append(group.name)
        elif names:
            said.append(f"{len(names)} of {len(group.layers)} {group.name}")
    return ", ".join(said)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _common(names: Sequence[str]) -> str:
    """The name with ``*`` for the numbers in which they differ."""
    parts = [re.split(r"(\d+)", name) for name in names]
    return "".join(of[0] if len(set(of)) == 1 else "*" for of in zip(*parts, strict=True))


def record_rows(model: LayeredModel, found: Sequence[SchemeOutcome]) -> list[Row]:
    """A row for every number of ranks and scheme. ``routes`` has the layers that are not dense."""
    return [
        {
            "model": model.name,
            "ranks": o.ranks,
            "scheme": o.scheme,
            "step_s": o.step_s,
            "exposed_s": o.step_s - o.alone_s,
            "speedup": o.speedup,
            "efficiency": o.speedup / o.ranks,
            "sent_bytes": round(o.sent),
            "routes": {name: o.ways[name].route for name in o.changed},
        }
        for o in found
    ]


def scaling(model: LayeredModel, found: Sequence[SchemeOutcome]) -> list[Row]:
    """Speed-ups, a row a number of ranks, a column a scheme; auto's step, and how many linear layers send rows."""
    rows: list[Row] = []
    for ranks, its in itertools.groupby(found, key=lambda o: o.ranks):
        by_scheme = {o.scheme: o for o in its}
        auto = by_scheme["auto"]
        rows.append(
            {
                "ranks": ranks,
                **{scheme: by_scheme[scheme].speedup for scheme in SCHEMES},
                "ms of auto": auto.step_s * 1e3,
                "rows": f"{len(auto.changed)}/{len(model.linear)}",
            }
        )
    return rows


def routes(model: LayeredModel, found: Sequence[SchemeOutcome]) -> list[str]:
    """Choices of auto, a line for every run of equal ones."""
    chosen = [o for o in found if o.scheme == "auto" and o.ranks > 1]
    said = []
    for names, run in itertools.groupby(chosen, key=lambda o: _by_route(model, o)):
        ranks = [o.ranks for o in run]
        where = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        said.append(f"  {where} ranks: {names}")
    return said


def _by_route(model: LayeredModel, found: SchemeOutcome) -> str:
    """Route by route, the layers that are not dense."""
    layers = {route: [n for n in found.changed if found.ways[n].route == route] for route in ("factors", "owners")}
    said = [f"{route} for {briefly(names, model.linear)}" for route, names in layers.items() if names]
    return "; ".join(said) or "all dense"


def crossovers(model: LayeredModel, batch: int, ranks: Sequence[int]) -> list[dict[str, object]]:
    """Linear layers with K* by number of ranks and whether the batch is below it; a row a group of equal layers."""
    rows: list[dict[str, object]] = []
    for group in groups(model.linear):
        layer = group.layers[0]
        k = layer.rows * batch
        stars = {p: crossover(layer, p) for p in ranks if p > 1}
        rows.append(
            {
                "layer": group.name,
                "layers": len(group.layers),
                "inputs": layer.inputs,
                "outputs": layer.outputs,
                "rows": k,
                "crossover_rows": {str(p): star for p, star in stars.items()},
                "below": {str(p): k <= star for p, star in stars.items()},
                "pays_up_to_ranks": math.floor(2 * crossover(layer, 2) / k),
            }
        )
    return rows


def crossover_table(found: Sequence[dict[str, object]], width: int) -> list[Row]:
    """:func:`crossovers` for the reader: K* in brackets where the batch has more rows.

    Columns of few ranks are left out until the table fits into ``width`` characters; the last one stays.
    """
    first = found[0]["crossover_rows"]
    ranks = list(first) if isinstance(first, dict) else []
    rows = [_crossover_row(x, ranks) for x in found]
    while len(ranks) > 1 and table_width(rows) > width:
        ranks = ranks[1:]
        rows = [_crossover_row(x, ranks) for x in found]
    return fit(rows, "linear layer", width)


def fit(rows: Sequence[Row], column: str, width: int) -> list[Row]:
    """The rows with the beginning of long names left out, so that the table fits into ``width`` characters."""
    over = table_width(rows) - width
    room = max(max((len(str(row[column])) for row in rows), default=0) - max(over, 0), 12)
    return [{**row, column: _tail(str(row[column]), room)} for row in rows]


def _tail(text: str, room: int) -> str:
    return text if len(text) <= room else f"…{text[-room + 1 :]}"


def _crossover_row(x: dict[str, object], ranks: Sequence[str]) -> Row:
    stars, below = x["crossover_rows"], x["below"]
    assert isinstance(stars, dict)
    assert isinstance(below, dict)
    count = x["layers"]
    return {
        "linear layer": x["layer"] if count == 1 else f"{x['layer']} × {count}",
        "in → out": f"{x['inputs']} → {x['outputs']}",
        "K": x["rows"],
        **{f"K* P={p}": _star(stars[p], below[p]) for p in ranks},
        "pays up to P": x["pays_up_to_ranks"],
    }


def _star(star: float, below: bool) -> str:
    text = f"{star:.0f}" if star >= 100 else f"{star:.3g}"
    return text if below else f"({text})"


def layer_rows(model: LayeredModel) -> list[Row]:
    """The layer table: one row a group of equal layers; parameters and FLOPs are of all of them."""
    return [
        {
            "layer": g.name,
            "kind": g.layers[0].kind,
            "layers": len(g.layers),
            "parameters": sum(x.parameters for x in g.layers),
            "flops": sum(x.flops for x in g.layers),
            "linear": g.layers[0].linear,
            "rows": g.layers[0].rows or None,
        }
        for g in groups(model.layers)
    ]


def layer_table(model: LayeredModel, width: int) -> list[Row]:
    """:func:`layer_rows` for the reader. Only linear layers have rows."""
    rows: list[Row] = [
        {
            "layer": x["layer"] if x["layers"] == 1 else f"{x['layer']} × {x['layers']}",
            "kind": x["kind"],
            "parameters": x["parameters"],
            "forward GFLOP": float(str(x["flops"])) / 1e9,
            "rows": x["rows"],
        }
        for x in layer_rows(model)
    ]
    return fit(rows, "layer", width)


def about(model: LayeredModel) -> list[str]:
    """Name and size, and what an example is, in two lines."""
    share = sum(x.parameters for x in model.linear) / model.parameters
    layers = f"{len(model.linear)} linear layer{'' if len(model.linear) == 1 else 's'}"
    size = BYTES * model.parameters / 1e6
    return [
        f"{model.name}: {model.parameters:,} parameters ({size:,.0f} MB), {share:.0%} in {layers}",
        f"an example: {model.example}, forward {model.flops / 1e9:.4g} GFLOP",
    ]


def of_a_rank(model: LayeredModel, setting: Assumptions) -> str:
    """The figures that the plan was made for, and a step without any exchange."""
    return f"a rank: {setting.words()}; a step alone takes {alone_s(model, setting) * 1e3:.4g} ms"


SCALING_TITLE = "speed-up over one rank, P·t(1)/t(P)"
ROUTES_TITLE = f"auto: the least work of all that come within {MARGIN:.0%} of the shortest step"
CROSSOVER_TITLE = "K*: rows up to which factors send fewer bytes; (K*): a rank has more"
