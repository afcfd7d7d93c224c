"""``commlib bench compare A B``: what changed between two saved runs, as ratios B / A and nothing else.

Rows belong together if they measured the same thing in the same place: kind, the columns that name the row,
and of the run ranks, hosts, rate and compute. A row measured more than once on a side counts with its median.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from commlib.bench.options import Json
from commlib.bench.report.formatting import positive
from commlib.bench.results.record import Record, read
from commlib.bench.results.table import Row, print_rows

_PLACE = ("ranks", "hosts", "ranks_per_host", "rate", "compute")
_FACTS = ("cpu", "cores", "system", "torch", "python", "commlib", "backend")  # if they differ, the reader must know


@dataclasses.dataclass(frozen=True)
class RecordKind:
    """How the rows of one kind are compared.

    Args:
        names: columns that say what was measured.
        figures: columns whose ratios are shown.
        gate: the one that ``--within`` looks at: a ratio to a baseline of the same run; None if there is none.
    """

    names: tuple[str, ...]
    figures: tuple[str, ...]
    gate: str | None


KINDS: Mapping[str, RecordKind] = {
    "train": RecordKind(("model", "route"), ("step_s", "vs_ddp", "times_fewer"), "vs_ddp"),
    "fsdp2": RecordKind(("model", "route"), ("step_s", "vs_fsdp2", "times_fewer"), "vs_fsdp2"),
    "exchange": RecordKind(
        ("model", "exchange", "codec"),
        ("step_s", "compress_s", "wire_s", "decompress_s", "vs_dense", "times_fewer"),
        "vs_dense",
    ),
    "cost": RecordKind(("model", "route"), ("held_mb", "attach_s", "step_s", "vs_ddp"), None),
    "link": RecordKind(("backend", "op", "bytes"), ("seconds", "of_line"), None),
    "codec": RecordKind(("codec", "op", "numel", "dtype", "device"), ("seconds", "copy_multiple"), "copy_multiple"),
}
Key = tuple[object, ...]
Side = dict[tuple[str, Key], list[Row]]


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Saved figures: a folder or a file of it.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The others.")],
    within: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="PERCENT",
            help="Exit with 1 if vs_ddp, vs_fsdp2, vs_dense or copy_multiple differs by more, a figure is lost or "
            "a loss wrong.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Ratios B / A of two saved runs, the largest change first.

    Times above 1 are slower in B; vs_ddp, vs_fsdp2, vs_dense and of_line above 1 are better in B.
    """
    records = {"A": _read(a), "B": _read(b)}
    sides = {name: index(found) for name, found in records.items()}
    common = [k for k in sides["A"] if k in sides["B"]]
    if not common:
        has = "; ".join(f"{name} ({path}) has {_contents(records[name])}" for name, path in (("A", a), ("B", b)))
        raise ValueError(f"nothing was measured in both: {has}")
    gated = [k for k in common if KINDS[k[0]].gate]
    if within is not None and not gated:
        kinds = ", ".join(sorted({k[0] for k in common}))
        raise ValueError(f"--within looks at vs_ddp, vs_fsdp2, vs_dense and copy_multiple, but only {kinds} is in both")
    lost = [text for k in common if (text := broken(k, sides["A"][k], sides["B"][k]))]
    for line in [*differences(records["A"], records["B"]), *_only(sides), *lost]:
        print(line, file=sys.stderr)
    for kind in KINDS:
        keys = [k for k in common if k[0] == kind]
        rows = sorted((ratios(k, sides["A"][k], sides["B"][k]) for k in keys), key=_change, reverse=True)
        if rows:
            _show(kind, rows, as_json=as_json)
    if within is not None:
        outside = [text for k in gated if (text := beyond(k, sides["A"][k], sides["B"][k], within))]
        for text in outside:
            print(text, file=sys.stderr)
        if outside or lost:
            raise typer.Exit(1)


def index(records: Sequence[Record]) -> Side:
    """Rows by (kind, what they measured and where); of kinds that can be compared."""
    found: Side = {}
    for record in (r for r in records if r.kind in KINDS):
        place = tuple(record.run.get(name) for name in _PLACE)
        for row in record.rows:
            key = (*place, *(row.get(name) for name in KINDS[record.kind].names))
            found.setdefault((record.kind, key), []).append(row)
    return found


def ratios(key: tuple[str, Key], a: Sequence[Row], b: Sequence[Row]) -> Row:
    """Row of the result: where, what, and B / A of every figure; None where a side has none.

    Args:
        key: as :func:`index` has it.
        a, b: the rows of each side that it stands for.
    """
    kind = KINDS[key[0]]
    shown: dict[str, object] = dict(zip((*_PLACE, *kind.names), key[1], strict=True))
    return {**shown, **{figure: _ratio(median(a, figure), median(b, figure)) for figure in kind.figures}}


def median(rows: Sequence[Row], figure: str) -> float | None:
    """Median of the positive numbers that rows have for a figure; None if there are none."""
    values = [v for r in rows if (v := positive(r.get(figure))) is not None]
    return statistics.median(values) if values else None


def broken(key: tuple[str, Key], a: Sequence[Row], b: Sequence[Row]) -> str | None:
    """Fault that no ratio shows: a figure that one side does not have, a loss that is right on one side only."""
    figure = KINDS[key[0]].gate or KINDS[key[0]].figures[0]
    found = [median(side, figure) is not None for side in (a, b)]
    if found[0] != found[1]:
        return f"{_say(key)}: {figure} is only in {'A' if found[0] else 'B'}"
    wrong = [any(r.get("loss_ok") is False for r in side) for side in (a, b)]
    if wrong[0] != wrong[1]:
        return f"{_say(key)}: the loss is wrong in {'A' if wrong[0] else 'B'} only"
    return None


def beyond(key: tuple[str, Key], a: Sequence[Row], b: Sequence[Row], percent: float) -> str | None:
    """Why a row does not pass ``--within``; None if it does. Twice and half as much differ equally: by 100 %."""
    gate = KINDS[key[0]].gate
    before, after = (None, None) if gate is None else (median(a, gate), median(b, gate))
    if before is None or after is None:
        return None
    ratio = after / before
    if max(ratio, 1 / ratio) - 1 <= percent / 100 + 1e-12:
        return None
    return f"{_say(key)}: {gate} was {before:.4g} and is {after:.4g}, {ratio - 1:+.1%}: more than {percent:g} %"


def differences(a: Sequence[Record], b: Sequence[Record]) -> list[str]:
    """A line for every fact of machine or software that is not the same in both."""
    said = []
    for fact in _FACTS:
        had, has = ({str(r.run.get(fact)) for r in side if r.run.get(fact) is not None} for side in (a, b))
        if had and has and had != has:
            said.append(f"warning: {fact} differs: {', '.join(sorted(had))} in A, {', '.join(sorted(has))} in B")
    return said


def _read(path: Path) -> list[Record]:
    try:
        return read(path)
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path}: cannot be read: {e}") from e


def _only(sides: Mapping[str, Side]) -> list[str]:
    """A line for each kind and place of which a side has rows that the other does not have."""
    lines = []
    for name, other in (("A", "B"), ("B", "A")):
        alone: dict[str, list[str]] = {}
        for key in sides[name].keys() - sides[other].keys():
            alone.setdefault(_say_place(key), []).append(_say_what(key))
        lines += [f"only in {name}: {place}: {', '.join(sorted(what))}" for place, what in sorted(alone.items())]
    return lines


def _contents(records: Sequence[Record]) -> str:
    found: dict[str, int] = {}
    for record in records:
        where = {name: record.run.get(name) for name in _PLACE if record.run.get(name) is not None}
        at = ", ".join(f"{name} {value}" for name, value in where.items())
        label = f"{record.kind} at {at}" if at else record.kind
        found[label] = found.get(label, 0) + len(record.rows)
    return ", ".join(f"{n} rows of {label}" for label, n in found.items())


def _say(key: tuple[str, Key]) -> str:
    """``train (ranks 4, hosts 4, rate 200mbit): gpt onebit``."""
    return f"{_say_place(key)}: {_say_what(key)}"


def _say_place(key: tuple[str, Key]) -> str:
    kind, values = key
    where = ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in zip(_PLACE, values, strict=False) if v is not None)
    return f"{kind} ({where})" if where else kind


def _say_what(key: tuple[str, Key]) -> str:
    return " ".join(map(str, key[1][len(_PLACE) :]))


def _show(kind: str, rows: Sequence[Row], *, as_json: bool) -> None:
    """Print a table; what is the same in all its rows goes into the title."""
    if as_json:
        print_rows([{"kind": kind, **row} for row in rows], as_json=True)
        return
    same = {n: rows[0][n] for n in _PLACE if all(r[n] == rows[0][n] for r in rows)}
    where = ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in same.items() if v is not None)
    title = f"{kind}, B / A" + (f"; {where}" if where else "")
    print_rows([{n: v for n, v in row.items() if n not in same} for row in rows], title=title)


def _change(row: Row) -> float:
    """The largest of a row's changes, up or down; a row without any comes last."""
    found = [row[f] for kind in KINDS.values() for f in kind.figures if f in row]
    return max((abs(math.log(v)) for v in found if isinstance(v, float)), default=-1.0)


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else b / a
