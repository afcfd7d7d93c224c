"""Candidates that the manager may choose for a model, with their cost. Pure functions of figures.

A *unit* is what goes one way as a whole: a linear layer that can send its rows (weight and bias), or a parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from commlib.codecs.base import Compressor
from commlib.exchange.factors import payload
from commlib.messaging.link_model import Link
from commlib.planning.cost.choose import WORTH, RouteChoice, choose, compress_too
from commlib.planning.cost.overlap import Bucket, TrainingPass, finish
from commlib.planning.cost.route_cost import Candidate, compressed, dense, factors, owners, owners_sent, push_pull
from commlib.planning.manager.codec_cost import CodecCost
from commlib.planning.manager.measurements import Measurements
from commlib.planning.plan import Plan
from commlib.planning.route import Route
from commlib.runtime.layers import LayerSpec


@dataclasses.dataclass(frozen=True)
class DecisionUnit:
    """Unit that is decided about as one.

    Attributes:
        name: of the linear layer, or of the parameter.
        nbytes: of its gradients.
        shape: (N, M) of the weight if its rows can be sent.
        itemsize: bytes of a value.
    """

    name: str
    nbytes: int
    shape: tuple[int, int] | None
    itemsize: int


@dataclasses.dataclass(frozen=True)
class CompressedUnit:
    """A unit by a compressed route.

    Attributes:
        sent: bytes of compressed layers that a rank sends.
        values: how many are compressed.
        plain: bytes of gradients that stay dense beside them: a bias that is too small.
    """

    sent: float
    values: int
    plain: int


@dataclasses.dataclass(frozen=True)
class _Known:
    """Figures by which the ways of rows are priced: as the arguments of :meth:`CandidateModel.choose`."""

    p: TrainingPass
    f: Measurements
    link: Link
    products: Mapping[str, tuple[float, float]]


class CandidateModel:
    """The units of a model.

    Args:
        specs: of all parameters; sparse ones are left out, for they have no choice.
        layers: linear layers whose rows can be sent.
        compressed: route → the plan by it, of those that lose something and may be chosen all the same.
        served: the plan by servers, if there are some.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        layers: Collection[str],
        compressed: Mapping[str, Plan] | None = None,
        served: Plan | None = None,
    ) -> None:
        specs = [s for s in specs if not s.sparse]
        self.unit_of = {s.name: s.layer if s.layer in layers and s.layer is not None else s.name for s in specs}
        nbytes = dict.fromkeys(self.unit_of.values(), 0)
        for s in specs:
            nbytes[self.unit_of[s.name]] += s.nbytes
        weights = {s.layer: s for s in specs if s.layer in layers and s.kind == "linear.weight"}
        self.units: dict[str, DecisionUnit] = {}
        for s in specs:
            name = self.unit_of[s.name]
            weight = weights.get(s.layer) if s.layer in layers else None
            shape = None if weight is None else weight.matrix
            self.units.setdefault(name, DecisionUnit(name, nbytes[name], shape, s.dtype.itemsize))
        found = {route: _route(route, plan) for route, plan in (compressed or {}).items()}
        self._row_codecs = {name: r.codec for name, r in found.items() if r.exchange == "factors"}
        self._served = {} if served is None else self._by_unit("none@push_pull", served)
        self._payloads = {n: self._by_unit(n, p) for n, p in (compressed or {}).items() if n not in self._row_codecs}

    def _by_unit(self, route: str, plan: Plan) -> dict[str, CompressedUnit]:
        """The units of which anything goes by it."""
        found: dict[str, CompressedUnit] = {}
        for p in (p for p in plan if not p.spec.sparse):
            name, spec = self.unit_of[p.spec.name], p.spec
            x = found.get(name, CompressedUnit(0.0, 0, 0))
            if str(p.route) == route:
                sent = p.route.carrier().wire_bytes(p.route.codec, spec, plan.world)
                x = dataclasses.replace(x, sent=x.sent + sent, values=x.values + spec.numel)
            else:
                x = dataclasses.replace(x, plain=x.plain + spec.nbytes)
            found[name] = x
        return {name: x for name, x in found.items() if x.values}

    def seen(self, f: Measurements) -> TrainingPass:
        """The pass as it was in these steps; by units, each with its first parameter's bucket."""
        buckets = [Bucket(ready, units) for ready, units in zip(f.ready, self._buckets(f), strict=True)]
        return TrainingPass(tuple(buckets), f.seen, f.end)

    def _buckets(self, f: Measurements) -> list[tuple[str, ...]]:
        """Units of each bucket, each in the one of its first parameter."""
        met: set[str] = set()
        owned = []
        for names in f.buckets:
            units = [u for u in dict.fromkeys(self.unit_of[n] for n in names) if u not in met]
            met.update(units)
            owned.append(tuple(units))
        return owned

    def calibrate(self, p: TrainingPass, span: float, link: Link) -> tuple[float, float]:
        """Factor of the link, and seconds to add, that turn a probe's figures into those of training steps.

        A probe is short, and nothing is computed beside it. So the link is taken to be slower (or faster) by the
        factor with which a dense step comes out as it was; where it does not depend on that, or by too much, what is
        left over is added to every prediction.

        Args:
            p: the pass.
            span: seconds that steps took which were all dense.
            link: as probed.

        Returns:
            The factor, from 1/8 to 8, and seconds to add.
        """

        def predicted(factor: float) -> float:
            return finish(p, self.dense(p, link.slower(factor)))

        low, high = 1 / 8, 8.0
        target = max(span, predicted(low))  # that long it takes if nothing of the link shows
        for _ in range(40):  # it grows with the factor
            middle = (low + high) / 2
            low, high = (middle, high) if predicted(middle) < target else (low, middle)
        factor = 1.0 if abs(predicted(1.0) - predicted(high)) < 0.01 * target else high
        return factor, span - predicted(factor)

    def choose(
        self,
        p: TrainingPass,
        f: Measurements,
        link: Link,
        products: Mapping[str, tuple[float, float]],
        codecs: Mapping[str, CodecCost],
        barred: Mapping[str, str],
        missing_s: float,
    ) -> RouteChoice:
        """The routes for a link: exact ones first; then codecs where the step is shorter still.

        Args:
            p: the pass.
            f: of steps that were all dense: their rows, and whether ranks' arithmetic is alike.
            link: as calibrated.
            products: linear layer → seconds of the products of its own rows, and of all ranks'.
            codecs: compressed route → what it costs to compute.
            barred: units that stay dense, and why.
            missing_s: added to predictions, from :meth:`calibrate`.
        """
        plain, known = self.dense(p, link), _Known(p, f, link, products)
        others, reasons = {}, {}
        for name in plain:
            ways = barred.get(name) or self._exact(name, known)
            if isinstance(ways, str):
                reasons[name] = ways
            else:
                others[name] = ways
        chosen = choose(p, plain, others, worth=WORTH)
        chosen = dataclasses.replace(chosen, reasons={**chosen.reasons, **reasons})
        smaller = {n: self._smaller(n, known, codecs) for n in plain if n not in barred}
        if codecs:
            chosen = compress_too(p, chosen, {n: ways for n, ways in smaller.items() if ways}, worth=WORTH)
        return dataclasses.replace(chosen, dense_s=chosen.dense_s + missing_s, seconds=chosen.seconds + missing_s)

    def _smaller(self, name: str, known: _Known, codecs: Mapping[str, CodecCost]) -> list[Candidate]:
        """A unit's compressed ways."""
        ways: list[Candidate | str] = []
        for route, cost in codecs.items():
            if route in self._row_codecs:
                ways.append(self._factors(name, known, route, cost))
            elif (x := self._payloads[route].get(name)) is not None:
                before, after = cost.before.seconds(x.values), cost.after.seconds(x.values)
                calls = {"gathers": cost.gathers, "reduces": cost.reduces}
                ways.append(
                    compressed(route, x.sent, known.link, **calls, before_s=before, after_s=after, plain=x.plain)
                )
        return [way for way in ways if not isinstance(way, str)]

    def worth_measuring(self, rows: Mapping[str, int], world: int) -> dict[str, tuple[int, int, int]]:
        """Layer → (N, M, rows) where rows would take fewer bytes than the gradient; the others lose in any case."""
        found = {}
        for name, count in rows.items():
            unit = self.units.get(name)
            if unit is not None and unit.shape is not None and world > 1:
                sent = min(_rows_nbytes(unit, count, codec) for codec in (None, *self._row_codecs.values()))
                least = min((world - 1) * sent, _owners_nbytes(unit, count, world))
                if least < 2 * (world - 1) / world * unit.nbytes:
                    found[name] = (*unit.shape, count)
        return found

    def dense(self, p: TrainingPass, link: Link) -> dict[str, Candidate]:
        """Every unit's dense way."""
        return {u: dense(self.units[u].nbytes, link) for b in p.buckets for u in b.layers}

    def _exact(self, name: str, known: _Known) -> list[Candidate] | str:
        """A unit's exact ways besides dense, or why there is none."""
        found = [self._factors(name, known), self._owners(name, known), self._push_pull(name, known)]
        return [way for way in found if not isinstance(way, str)] or str(found[0])

    def _push_pull(self, name: str, known: _Known) -> Candidate | str:
        """Candidate push/pull through the parameter servers; what is too small stays dense."""
        x = self._served.get(name)
        if x is None or known.link.push_pull is None:
            return "no servers, or too small for them"
        return push_pull(int(x.sent), known.link, plain=x.plain)

    def _owners(self, name: str, known: _Known) -> Candidate | str:
        """Candidate rows to owners; what it costs to compute follows from the product of its own rows, on any
        machine."""
        unit, rows, link = self.units[name], known.f.rows.get(name), known.link
        if unit.shape is None or rows is None or name not in known.p.rows or name not in known.products:
            return "as for factors"
        if _owners_nbytes(unit, rows, link.world) >= 2 * (link.world - 1) / link.world * unit.nbytes:
            return f"{rows} rows a rank and a block are more bytes than the gradient"
        return owners(*unit.shape, rows, link, local_s=known.products[name][0], itemsize=unit.itemsize)

    def _factors(
        self, name: str, known: _Known, route: str = "factors", cost: CodecCost | None = None
    ) -> Candidate | str:
        """The way of a unit's rows, or why there is none."""
        unit, codec = self.units[name], self._row_codecs.get(route)
        if unit.shape is None:
            return "has no other exact way"
        if not known.f.arithmetic:
            return "ranks with unlike CPUs, threads or versions would not multiply rows to the same bits"
        if name not in known.f.rows or name not in known.p.rows:
            return "its rows were not seen (compiled, or not used)"
        rows, link = known.f.rows[name], known.link
        sent = _rows_nbytes(unit, rows, codec)
        if link.world == 1 or (link.world - 1) * sent >= 2 * (link.world - 1) / link.world * unit.nbytes:
            return f"{rows} rows a rank are more bytes than the gradient"
        if name not in known.products:
            return "the products of its rows were not measured"
        local, rebuilt = known.products[name]
        values = rows * sum(unit.shape)
        before, after = (0.0, 0.0) if cost is None else (cost.before.seconds(values), cost.after.seconds(values))
        return factors(
            *unit.shape,
            rows,
            link,
            local_s=local,
            rebuild_s=rebuilt + after,
            route=route,
            payload=sent,
            before_s=before,
        )


def _route(name: str, plan: Plan) -> Route:
    return next(p.route for p in plan if str(p.route) == name)


def _rows_nbytes(unit: DecisionUnit, rows: int, codec: Compressor | None) -> int:
    """Bytes of a rank's rows."""
    n, m = unit.shape or (0, 0)
    return (
        rows * (n + m) * unit.itemsize
        if codec is None
        else payload.RowPayload(n, m, codec).nbytes(payload.RowCapacity(rows))
    )


def _owners_nbytes(unit: DecisionUnit, rows: int, world: int) -> int:
    """Bytes a rank sends by owners."""
    return sum(owners_sent(*(unit.shape or (0, 0)), rows, world, unit.itemsize))


def routes(choice: RouteChoice, seen: Mapping[str, float]) -> dict[str, str]:
    """Unit → route of those that are not dense, in the order in which the backward pass comes to them."""
    changed = [u for u, way in choice.ways.items() if way.route != "dense"]
    return {u: choice.ways[u].route for u in sorted(changed, key=lambda u: (seen.get(u, 0.0), u))}


def by_gain(choice: RouteChoice) -> list[str]:
    """Units that are not dense, those first whose change saves most by itself."""
    changed = [u for u, way in choice.ways.items() if way.route != "dense"]
    return sorted(changed, key=lambda u: choice.ways[u].alone_s - choice.dense[u].alone_s)
