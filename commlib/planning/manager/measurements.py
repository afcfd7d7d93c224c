"""Measurements of one rank's steps, and what is made of all ranks'."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commlib.messaging.link_model import AlphaBeta, Link
from commlib.planning.manager import codec_cost
from commlib.planning.manager.codec_cost import CodecCost
from commlib.runtime.streams import Moment


@dataclasses.dataclass
class MeasuredStep:
    """Times of one exchange and the passes before it, in seconds since the first forward pass began.

    Attributes:
        buckets: (ready, layers), in the order in which DDP handed them over.
        seen: linear layer → when the backward pass came to it; of several calls the last.
        rows: linear layer → rows of all calls.
        end: of the backward pass.
        span: until everything had been exchanged.
        rest: from the end of the exchange before to the forward pass: the optimizer, the next batch.
    """

    buckets: list[tuple[float, tuple[str, ...]]] = dataclasses.field(default_factory=list)
    seen: dict[str, float] = dataclasses.field(default_factory=dict)
    rows: dict[str, int] = dataclasses.field(default_factory=dict)
    end: float = 0.0
    span: float = 0.0
    rest: float = 0.0


class StepMeasurements:
    """Notes down steps. On a device it notes moments of its work, which are read when it is asked for them.

    Args:
        now: this moment.
    """

    def __init__(self, now: Callable[[], Moment]) -> None:
        self._now = now
        self._begun: Moment | None = None
        self._ended: Moment | None = None
        self._step = _Noted()
        self._steps: list[tuple[_Noted, Moment]] = []

    def begin(self) -> None:
        """A forward pass begins; only the first since an exchange counts."""
        if self._begun is None:
            self._begun = self._now()

    def bucket(self, layers: tuple[str, ...], at: Moment | None = None) -> None:
        """DDP hands over a bucket, now or at a moment; ``layers`` names its parameters."""
        self._step.buckets.append((at or self._now(), layers))

    def rows(self, layer: str, count: int) -> None:
        """The backward pass has come to a linear layer."""
        self._step.seen[layer] = self._now()
        self._step.rows[layer] = self._step.rows.get(layer, 0) + count

    def backward_ended(self, at: Moment | None = None) -> None:
        """But the exchange has not; now or then."""
        self._step.ended = at or self._now()

    def end(self) -> None:
        """Everything has been exchanged."""
        now = self._now()
        if self._begun is not None:
            self._step.before, self._step.through = self._ended, now
            self._steps.append((self._step, self._begun))
        self._ended, self._begun, self._step = now, None, _Noted()

    def resume(self) -> None:
        """Begin the time between steps anew: a review since the exchange is no rest of the training."""
        self._ended = self._now()

    def take(self) -> list[MeasuredStep]:
        """The steps since the last call; waits for the device to be through with them."""
        steps, self._steps = self._steps, []
        return [noted.since(begun) for noted, begun in steps]


@dataclasses.dataclass
class _Noted:
    """Moments of a step; as those of :class:`MeasuredStep`."""

    buckets: list[tuple[Moment, tuple[str, ...]]] = dataclasses.field(default_factory=list)
    seen: dict[str, Moment] = dataclasses.field(default_factory=dict)
    rows: dict[str, int] = dataclasses.field(default_factory=dict)
    ended: Moment | None = None
    through: Moment | None = None
    before: Moment | None = None

    def since(self, begun: Moment) -> MeasuredStep:
        """The step, which has come through, in seconds since it began."""
        return MeasuredStep(
            [(at.since(begun), names) for at, names in self.buckets],
            {name: at.since(begun) for name, at in self.seen.items()},
            self.rows,
            end=0.0 if self.ended is None else self.ended.since(begun),
            span=0.0 if self.through is None else self.through.since(begun),
            rest=0.0 if self.before is None else begun.since(self.before),
        )


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Medians over steps; of several ranks, the slowest's.

    Attributes:
        steps: how many.
        span: seconds of a step from the forward pass to the end of the exchange.
        rest: seconds between steps.
        ready: of each bucket.
        buckets: their layers.
        end: of the backward pass.
        seen: linear layer → when the backward pass came to it.
        rows: linear layer → its rows, the most in any step.
        wire: seconds that collectives were under way, a step.
        products: linear layer → seconds of the product of its own rows, and of all ranks'; where measured.
        codecs: compressed route → what it costs to compute; where measured.
        link: if measured.
        probe_s: seconds that it took to measure link and products, if they were.
        arithmetic: what must be alike where ranks multiply the same rows.
        differs: linear layer that was to be proved → how far the gradient of its rows was from the true one, in
            multiples of what rounding explains; negative: nothing could be compared.
    """

    steps: int
    span: float
    rest: float
    ready: tuple[float, ...]
    buckets: tuple[tuple[str, ...], ...]
    end: float
    seen: Mapping[str, float]
    rows: Mapping[str, int]
    wire: float = 0.0
    products: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    codecs: Mapping[str, CodecCost] = dataclasses.field(default_factory=dict)
    link: Link | None = None
    probe_s: float = 0.0
    arithmetic: str = ""
    differs: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, steps: Sequence[MeasuredStep], **measured: Any) -> Measurements:
        """Measurements of this rank's steps; those whose buckets are not the last one's only count for their rows."""
        if not steps:
            return cls(0, 0.0, 0.0, (), (), 0.0, {}, {}, **measured)
        layers = tuple(names for _, names in steps[-1].buckets)
        alike = [s for s in steps if tuple(names for _, names in s.buckets) == layers]
        ready = [statistics.median(times) for times in zip(*([t for t, _ in s.buckets] for s in alike), strict=True)]
        known = {name for s in alike for name in s.seen}
        seen = {n: statistics.median([s.seen[n] for s in alike if n in s.seen]) for n in known}
        rows = {n: max(s.rows.get(n, 0) for s in steps) for n in {n for s in steps for n in s.rows}}
        span, rest, end = (statistics.median(getattr(s, f) for s in alike) for f in ("span", "rest", "end"))
        return cls(len(alike), span, rest, tuple(ready), layers, end, seen, rows, **measured)

    def to_wire(self) -> dict[str, Any]:
        """Measurements as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, x: Mapping[str, Any]) -> Measurements:
        """Read measurements from :meth:`to_wire`, through msgpack."""
        link = x["link"]
        lines = link and Link(
            link["world"],
            AlphaBeta(**link["all_reduce"]),
            AlphaBeta(**link["all_gather"]),
            link["drag"],
            link["push_pull"] and AlphaBeta(**link["push_pull"]),
        )
        tuples = {"ready": tuple(x["ready"]), "buckets": tuple(tuple(b) for b in x["buckets"])}
        products = {name: (local, rebuilt) for name, (local, rebuilt) in x["products"].items()}
        costs = {route: CodecCost.from_wire(c) for route, c in x["codecs"].items()}
        return cls(**{**x, **tuples, "products": products, "codecs": costs, "link": lines})


def slowest(ranks: Sequence[Measurements]) -> Measurements:
    """Measurements of the slowest rank: the most of everything. Ranks without steps do not count."""
    had = [f for f in ranks if f.steps] or list(ranks[:1])
    alike = [f for f in had if f.buckets == had[0].buckets]
    links = [f.link for f in ranks if f.link is not None]
    return Measurements(
        steps=min(f.steps for f in had),
        span=max(f.span for f in had),
        rest=max(f.rest for f in had),
        ready=tuple(max(times) for times in zip(*(f.ready for f in alike), strict=True)),
        buckets=had[0].buckets,
        end=max(f.end for f in had),
        seen=_most([f.seen for f in had]),
        rows=_most([f.rows for f in had]),
        wire=max(f.wire for f in had),
        products=_products([f.products for f in had]),
        codecs={r: codec_cost.slowest([f.codecs[r] for f in ranks if r in f.codecs]) for r in ranks[0].codecs},
        link=_worst(links) if links else None,
        probe_s=max(f.probe_s for f in ranks),
        arithmetic=had[0].arithmetic if len({f.arithmetic for f in ranks}) == 1 else "",
        differs=_worst_proof([f.differs for f in ranks]),
    )


def _worst_proof(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest difference of any rank; negative if any rank could not compare."""
    low, high = _most([{n: -d for n, d in x.items()} for x in each]), _most(each)
    return {n: -low[n] if low[n] > 0 else high[n] for n in high}


def _most(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {n: max(x[n] for x in each if n in x) for n in sorted({n for x in each for n in x})}


def _products(each: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    own, everyones = ([{n: pair[i] for n, pair in x.items()} for x in each] for i in (0, 1))
    rebuilt = _most(everyones)
    return {n: (seconds, rebuilt[n]) for n, seconds in _most(own).items()}


def _worst(links: Sequence[Link]) -> Link:
    reduce, gather = _slowest([x.all_reduce for x in links]), _slowest([x.all_gather for x in links])
    servers = [x.push_pull for x in links if x.push_pull is not None]
    drag = max(x.drag for x in links)
    return Link(links[0].world, reduce, gather, drag, _slowest(servers) if servers else None)


def _slowest(lines: Sequence[AlphaBeta]) -> AlphaBeta:
    return AlphaBeta(max(line.alpha for line in lines), max(line.beta for line in lines))
