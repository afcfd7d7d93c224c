"""Plans as files: saved, loaded, pinned to a model, and compared with another."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from commlib.__version__ import __version__
from commlib.codecs.base import Slot
from commlib.codecs.registry import compressors, make
from commlib.errors import unknown
from commlib.exchange.registry import OF_SPARSE
from commlib.exchange.scatter_gather import stripes
from commlib.groups.world import World
from commlib.planning.route import Route, resolve
from commlib.runtime.layers import Kind, LayerSpec


@dataclasses.dataclass(frozen=True)
class PlannedLayer:
    """Line of a plan: a layer, its route, and why.

    Attributes:
        spec: the layer.
        route: its route.
        dense: the dense route of warm-up steps.
        reason: why it has that route.
        predicted_s: seconds its exchange takes by itself, where a manager has predicted it.
        measured_s: seconds from its issue to its end, coding included, on this rank: what runs beside it counts too.
    """

    spec: LayerSpec
    route: Route
    dense: Route
    reason: str
    predicted_s: float | None = None
    measured_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Layer by layer, how gradients travel. Prints as a table.

    Attributes:
        layers: by parameter name.
        world: ranks, or under a hierarchy nodes: those that a route connects.
        about: a line on the whole.
        local: ranks on each node under a hierarchy, each of which exchanges a stripe of every layer; otherwise 1.
        recoded: whether the sum of a stripe goes through the codec again on its way to all ranks.
    """

    layers: Mapping[str, PlannedLayer]
    world: int
    about: str = ""
    local: int = 1
    recoded: bool = True

    def __iter__(self) -> Iterator[PlannedLayer]:
        return iter(self.layers.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Keep it in a file, for :meth:`load`. A file that is there is replaced, whole or not at all.

        Raises:
            OSError: it cannot be written.
            ValueError: a route has no name that can be read back.
        """
        save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """A plan from a file. ``commlib.attach(ddp, plan)`` pins it: its routes, and no others.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no plan.
        """
        return load(path)

    def diff(self, new: Plan) -> str:
        """Difference of a new plan, as text."""
        return diff(self, new)

    def because(self, about: str, reason: str) -> Plan:
        """The same routes for another reason; sparse gradients have but one."""
        layers = {n: p if p.spec.sparse else dataclasses.replace(p, reason=reason) for n, p in self.layers.items()}
        return dataclasses.replace(self, layers=layers, about=about)

    def noted(self, about: str, *, local: int = 1) -> Plan:
        """The same plan, with one more thing to say about it, and with so many ranks on a node."""
        return dataclasses.replace(self, about="; ".join(filter(None, [self.about, about])), local=local)

    def remarked(self, remarks: Mapping[str, str]) -> Plan:
        """The same plan, with something more to say about why linear layers go as they do.

        Args:
            remarks: name of a linear layer → in words.
        """
        layers = dict(self.layers)
        for name, p in self.layers.items():
            if p.spec.layer is not None and p.spec.layer in remarks:
                layers[name] = dataclasses.replace(p, reason=f"{p.reason}; {remarks[p.spec.layer]}")
        return dataclasses.replace(self, layers=layers) if remarks else self

    @functools.cached_property
    def plain(self) -> bool:
        """Whether all layers go as they are, as without a hook."""
        return all(p.route.plain for p in self)

    @functools.cached_property
    def remembers(self) -> bool:
        """Whether any route keeps something from step to step."""
        return any(p.route.codec.slots(p.spec) or p.route.codec.random for p in self)

    @functools.cached_property
    def held_bytes(self) -> int:
        """Bytes that codecs keep from step to step, at the rank that keeps most: two buffers of each residual."""
        return sum(self._held(p) for p in self if not p.spec.sparse)

    def _held(self, p: PlannedLayer) -> int:
        codec, spec = p.route.codec, p.spec
        if self.local > 1 and not p.route.by_rows:
            spec = stripes(codec, spec, self.local)[0].spec
        own = p.route.carrier().owned(codec, spec, World(0, self.world)) if self.recoded else None
        made: list[Slot] = [*codec.slots(spec).values(), *(codec.slots(own.spec).values() if own is not None else ())]
        return 2 * sum(slot.nbytes for slot in made)

    def describe(self) -> dict[str, str]:
        """Name → ``shape dtype route``: what every rank must agree on."""
        return {p.spec.name: f"{p.spec.layout()} {p.route}" for p in self}

    def __str__(self) -> str:
        head = ["layer", "gradient", "route", "bytes/step", "of dense", "predicted ms", "measured ms", "why"]
        rows = [head, *(self._row(p) for p in self)]
        shown = [i for i in range(len(head)) if i not in (5, 6) or any(r[i] != "-" for r in rows[1:])]
        widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
        lines = ["  ".join((str.rjust if 3 <= i <= 6 else str.ljust)(r[i], widths[i]) for i in shown) for r in rows]
        return "\n".join([*filter(None, [self.about]), *(line.rstrip() for line in lines), *self._kept()])

    def _kept(self) -> list[str]:
        """A line on what codecs remember, if they do."""
        full = sum(p.spec.nbytes for p in self)
        if not (kept := self.held_bytes):
            return []
        return [
            f"kept from step to step: {kept:,} bytes a rank, {kept / full:.2f} of the gradients; and some to work in"
        ]

    def _row(self, p: PlannedLayer) -> list[str]:
        ranks = self.world * self.local
        passes = p.route.carrier().PASSES
        sent, full = self._sent(p), passes * (ranks - 1) / ranks * p.spec.nbytes
        known = not math.isnan(sent)
        share = f"1/{full / sent:.1f}" if sent and full and known else "-"
        times = ["-" if s is None else f"{s * 1e3:.3g}" for s in (p.predicted_s, p.measured_s)]
        return [
            p.spec.name,
            p.spec.layout(),
            str(p.route),
            f"{sent:,.0f}" if known else "by batch",
            share,
            *times,
            p.reason,
        ]

    def _sent(self, p: PlannedLayer) -> float:
        """Bytes that the busiest rank sends by a route in a step: under a hierarchy, to other nodes."""
        carry = p.route.carrier().wire_bytes
        if self.local == 1 or p.route.by_rows:
            return carry(p.route.codec, p.spec, self.world * self.local)
        return max(carry(p.route.codec, s.spec, self.world) for s in stripes(p.route.codec, p.spec, self.local))


SCHEMA = 1
_FLOATS = {name: t for name, t in vars(torch).items() if isinstance(t, torch.dtype) and t.is_floating_point}
_Check = tuple[Callable[[Any], bool], str]  # whether a value will do, and what would
_TEXT: _Check = (lambda v: isinstance(v, str), "a text")
_COUNT: _Check = (lambda v: type(v) is int and v >= 0, "a whole number ≥ 0")
_TIME: _Check = (lambda v: abs(v) < 1e300 if type(v) is int or isinstance(v, float) else v is None, "seconds or null")
_PAST: _Check = (lambda v: _TIME[0](v) and (v is None or v >= 0), "seconds ≥ 0 or null")  # a prediction may be a saving
_HEAD: Mapping[str, _Check] = {
    **dict.fromkeys(("commlib", "about"), _TEXT),
    "schema": _COUNT,
    "world_size": (lambda v: type(v) is int and v > 0, "a whole number > 0"),
    "local_size": (lambda v: v is None or (type(v) is int and v > 1), "a whole number > 1, or null"),
    "layers": (lambda v: isinstance(v, list), "a list"),
}
_LAYER: Mapping[str, _Check] = {
    **dict.fromkeys(("name", "route", "reason"), _TEXT),
    "predicted_s": _TIME,
    "measured_s": _PAST,
    "shape": (lambda v: isinstance(v, list) and all(map(_COUNT[0], v)), "a list of whole numbers ≥ 0"),
    "dtype": (lambda v: isinstance(v, str) and v in _FLOATS, "a floating-point dtype such as float32"),
    "kind": (lambda v: v in get_args(Kind), f"one of {', '.join(get_args(Kind))}"),
    "rows": (lambda v: v is None or _COUNT[0](v), "a whole number ≥ 0, or null"),
}


def to_text(plan: Plan) -> str:
    """The plan as JSON; a time that is not finite is left out. Raises ValueError if a route could not be read back."""
    for route, name in {str(p.route): p.spec.name for p in plan}.items():
        _route(route, plan.world, f"the plan cannot be saved: layer {name!r}")
    head = {"schema": SCHEMA, "commlib": __version__, "world_size": plan.world, "about": plan.about}
    head |= {"local_size": plan.local} if plan.local > 1 else {}  # under a hierarchy; world_size counts nodes then
    return json.dumps({**head, "layers": [_entry(p) for p in plan]}, indent=1) + "\n"


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Puts a plan's file there at once: whoever reads it finds the old one or the new one, never a part of either.

    Raises:
        ValueError, MissingDependency: as :func:`to_text`.
        OSError: it cannot be written; what was there before still is.
    """
    text, path = to_text(plan), Path(path)
    part = path.parent / f".plan-{uuid.uuid4().hex}"
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as e:
        why = e.strerror if path.parent.is_dir() else f"{path.parent} is no folder; make it first"
        raise OSError(e.errno, f"the plan cannot be saved: {why}", str(path)) from e
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def load(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file. Raises OSError if it cannot be read; and as :func:`from_text`."""
    return from_text(Path(path).read_text(encoding="utf-8", errors="replace"), str(path))


def from_text(text: str, origin: str) -> Plan:
    """The plan that :func:`to_text` wrote: layers on the cpu, tied to no linear layer before :func:`pin`.

    Raises:
        ValueError: not JSON, no plan, another schema, a field missing or wrong, a route that is not known.
        MissingDependency: a codec needs a package that is not installed.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is not JSON: {error}") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        has = "is no plan that commlib has saved: it has no schema" if schema is None else f"has schema {schema!r:.40}"
        raise ValueError(f"{origin} {has}; commlib {__version__} reads schema {SCHEMA}: save a plan anew")
    world = _checked(found, _HEAD, origin)["world_size"]
    layers: dict[str, PlannedLayer] = {}
    routes: dict[str, Route] = {}
    for number, entry in enumerate(found["layers"], 1):
        where = f"{origin}: layer {entry.get('name', number) if isinstance(entry, dict) else number!r:.80}"
        e = _checked(entry, _LAYER, where)
        spec = LayerSpec(e["name"], tuple(e["shape"]), _FLOATS[e["dtype"]], kind=e["kind"], rows=e.get("rows"))
        if spec.name in layers:
            raise ValueError(f"{where} is there twice")
        route = routes[e["route"]] = routes.get(e["route"]) or _route(e["route"], world, where)
        times = e.get("predicted_s"), e.get("measured_s")
        layers[spec.name] = PlannedLayer(spec, route, _dense(route, world), e["reason"], *times)
    return Plan(layers, world, found["about"], found.get("local_size") or 1)


def pin(plan: Plan, specs: Sequence[LayerSpec], world: int) -> Plan:
    """The plan for these layers, on ``world`` ranks, with the routes of one that was made for the same model.

    Rows are taken over, and predictions if they were for as many ranks; what was measured is not.

    Raises:
        ValueError: other layers, shapes or dtypes; a route that refuses its layer; or a bias that goes by factors or
            owners without its weight, or the reverse. At most three layers are named.
    """
    here, then = {s.name: s for s in specs}, plan.layers
    now, was = {n: s.layout() for n, s in here.items()}, {n: p.spec.layout() for n, p in then.items()}
    apart = ((n, now.get(n, "missing"), was.get(n, "missing")) for n in {**now, **was})
    _stop("the plan is of another model", (f"{n} is {a} in the model, {b} in the plan" for n, a, b in apart if a != b))
    routes = {n: p.route for n, p in then.items()}
    refused = ((n, routes[n].codec.refuse(s) or routes[n].refuse(s)) for n, s in here.items())
    _stop("a route cannot carry its layer", (f"{n} by {routes[n]}: {why}" for n, why in refused if why))
    by_rows = {s.name: routes[s.name].exchange for s in specs if routes[s.name].by_rows}
    sent = {s.layer: by_rows[s.name] for s in specs if s.kind == "linear.weight" and s.name in by_rows}
    alone = (s.name for s in specs if sent.get(s.layer) != by_rows.get(s.name))
    _stop("a bias must go by factors or owners if its weight does, and only then", alone)
    note = "" if plan.world == world else f"planned for {plan.world} rank{'s' * (plan.world != 1)}"
    layers = {}
    for n, s in here.items():
        spec = s if s.rows is not None else dataclasses.replace(s, rows=then[n].spec.rows)
        why, predicted = _pinned(then[n].reason, note), None if note else then[n].predicted_s
        layers[n] = PlannedLayer(spec, routes[n], _dense(routes[n], world), why, predicted)
    return Plan(layers, world, _pinned(plan.about, note))


def diff(old: Plan, new: Plan) -> str:
    """Difference of two plans: the line about predicted steps; layers in one only, gradients, and routes with their
    reasons."""
    table = [("layer", "old", "new", "why")]
    for name in {**old.layers, **new.layers}:
        both = [plan.layers.get(name) for plan in (old, new)]
        before, after = (f"{p.spec.layout()} {p.route}" if p else "-" for p in both)
        if before != after:
            table.append((name, before, after, " → ".join(dict.fromkeys(p.reason or "-" for p in both if p))))
    same = _pinned(old.about) == _pinned(new.about)
    lines = [] if same else [f"{k}: {p.about or 'no prediction'}" for k, p in (("old", old), ("new", new))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return "\n".join([*lines, *(rows if len(rows) > 1 else [])]) or "no difference"


def _entry(p: PlannedLayer) -> dict[str, Any]:
    s, times = p.spec, {"predicted_s": p.predicted_s, "measured_s": p.measured_s}
    seconds = {name: t if _LAYER[name][0](t) else None for name, t in times.items()}
    head = {"name": s.name, "shape": s.shape, "dtype": str(s.dtype).removeprefix("torch."), "kind": s.kind}
    why = {"reason": p.reason, **seconds}
    return {**head, "route": str(p.route), **({} if s.rows is None else {"rows": s.rows}), **why}


def _checked(entry: Any, fields: Mapping[str, _Check], where: str) -> dict[str, Any]:
    """The entry, if all its fields are as they must be; those that may be null may be missing."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object, got {entry!r:.40}")
    wrong = [unknown("field", k, fields) for k in entry if k not in fields]
    found = {k: f"got {entry[k]!r:.40}" if k in entry else "and is missing" for k in fields}
    wrong += [f"{k} must be {what}, {found[k]}" for k, (good, what) in fields.items() if not good(entry.get(k))]
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong[:3])}")
    return entry


def _route(text: str, world: int, where: str) -> Route:
    """The route of a text. A codec may be one that is handed out as the dense form of another: dgc's heavyball."""
    try:
        return resolve(text, world)
    except (ValueError, TypeError) as e:
        codec, _, exchange = text.partition("@")
        for other in compressors() if exchange == "dense" else ():
            with contextlib.suppress(Exception):  # most know other options, or none
                form = make(codec.replace(codec.partition(":")[0], other, 1)).dense_form()
                if form is not None and str(form) == codec:
                    return Route("dense", form)
        raise ValueError(f"{where}: no route {text!r}: {e}") from e


def _dense(route: Route, world: int) -> Route:
    """The route while steps are dense; what is dense already stays (dgc's small layers keep their momentum)."""
    if route.exchange == "dense" and route.codec.lossless:
        return route
    if route.exchange in OF_SPARSE:
        return resolve("none@sparse", world)
    form = route.codec.dense_form()
    return resolve("none@dense", world) if form is None else Route("dense", form)


def _pinned(text: str, note: str = "") -> str:
    return ": ".join(filter(None, ("pinned", note, text.removeprefix("pinned").removeprefix(": "))))


def _stop(what: str, layers: Iterable[str]) -> None:
    """Raises ValueError if there are any, and names three."""
    found = list(layers)
    if found:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(f"{what}: {'; '.join(found[:3])}{more}")
