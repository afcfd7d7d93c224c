"""Which layers should stay put, given what each way costs. Pure.

Dense, factors and owners carry gradients, which may hide behind the backward pass; a placed layer's activations are
waited for, forward and backward, and hide behind nothing. On the other hand a rank reads, writes and updates only 1/P
of the weight and of its gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch

from commlib.messaging.link_model import Link
from commlib.placement.communication import EXACT, HEADER, RowCoder
from commlib.planning.cost.choose import WORTH, choose, mbit, ms
from commlib.planning.cost.overlap import Bucket, TrainingPass
from commlib.planning.cost.route_cost import Candidate, dense, factors, owners
from commlib.planning.cost.volume import FactorableShape, placed_sent

_FIRST, _CAP = 1 << 20, 25 << 20  # bytes of DDP's first bucket, and of the others


@dataclasses.dataclass(frozen=True)
class PlaceableLinear:
    """A layer that may be placed, as the slowest rank has it.

    Args:
        n: outputs.
        m: inputs.
        rows: K of a rank.
        input_grad: whether its input needs a gradient.
        seen_s: seconds from the step's begin until its backward pass begins.
        local_s: of the product of a rank's own rows.
        rebuild_s: of all ranks'.
        whole_s: of all that a step does with the weight, if a rank has it whole and its own rows.
        part_s: the same, if a rank has 1/P of it and all ranks' rows.
        itemsize: bytes of a value.
    """

    n: int
    m: int
    rows: int
    input_grad: bool
    seen_s: float
    local_s: float
    rebuild_s: float
    whole_s: float
    part_s: float
    itemsize: int = 4


@dataclasses.dataclass(frozen=True)
class PlacementMeasurements:
    """Measurements that placing is decided by; the same on all ranks.

    Args:
        link: as probed.
        layers: that may be placed.
        units: every layer, and every parameter that is of none of them: when its gradient is ready, and its bytes.
        end_s: seconds until the backward pass ends.
    """

    link: Link
    layers: Mapping[str, PlaceableLinear]
    units: Mapping[str, tuple[float, int]]
    end_s: float

    def seen(self) -> TrainingPass:
        """The pass, in buckets as DDP fills them."""
        buckets: list[Bucket] = []
        names: list[str] = []
        held, cap = 0, _FIRST
        for name, (ready, nbytes) in sorted(self.units.items(), key=lambda item: item[1][0]):
            names.append(name)
            held += nbytes
            if held >= cap:
                buckets.append(Bucket(ready, tuple(names)))
                names, held, cap = [], 0, _CAP
        if names:
            buckets.append(Bucket(max(self.units[n][0] for n in names), tuple(names)))
        rows = {name: x.seen_s for name, x in self.layers.items()}
        return TrainingPass(tuple(buckets), rows, self.end_s, drag=self.link.drag)


@dataclasses.dataclass(frozen=True)
class Considered:
    """Layers that were weighed up. Prints as a table.

    Attributes:
        placed: layers that stay put.
        ways: layer → what each way costs: dense first, placed last.
        seconds: predicted of a step, from its begin until all has been exchanged.
        others_s: the same if nothing is placed and gradients go by the best exact routes.
        link: that this holds for.
    """

    placed: tuple[str, ...]
    ways: Mapping[str, Sequence[Candidate]]
    seconds: float
    others_s: float
    link: Link

    def __str__(self) -> str:
        head = ["layer", *(f"{r} ms" for r in ("dense", "factors", "owners", "placed")), "sent", "placed", "why"]
        rows = [head, *(self._row(name) for name in self.ways)]
        widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        about = f"{self.link.world} ranks, {mbit(self.link)}: a step takes {ms(self.seconds)}"
        return "\n".join([f"{about}, with nothing placed {ms(self.others_s)}", *lines])

    def _row(self, name: str) -> list[str]:
        by = {way.route: way for way in self.ways[name]}
        costs = [f"{by[r].alone_s * 1e3:.3g}" if r in by else "-" for r in ("dense", "factors", "owners", "placed")]
        return [name, *costs, f"{by['placed'].sent:,.0f}", "yes" if name in self.placed else "no", self._why(name)]

    def _why(self, name: str) -> str:
        *others, put = self.ways[name]
        best = min(others, key=lambda w: w.alone_s)
        if name in self.placed:
            return f"{best.route} would cost {ms(best.alone_s)}"
        if put.alone_s >= best.alone_s:
            return f"{best.route} costs {ms(best.alone_s)}"
        return f"{best.route} costs {ms(best.alone_s)}, but that hides behind the backward pass, or too little is saved"


def placed_way(x: PlaceableLinear, link: Link, coder: RowCoder = EXACT) -> Candidate:
    """A layer that stays put: its collectives' bytes one after another, with a header; what its part takes less.

    Of a codec the bytes are in it, and not the time that it takes.
    """
    shape = FactorableShape(x.m, x.n, x.rows, link.world, link.world)
    each = x.itemsize if coder.exact else coder.nbytes(max(1, x.rows), x.m, torch.float32) / (max(1, x.rows) * x.m)
    parts = [each * v for v in placed_sent(shape, input_grad=x.input_grad)]
    header = (link.world - 1) * HEADER
    wire = sum(link.all_gather.seconds(b) for b in (header, *parts))
    return Candidate("placed", header + sum(parts), wire, 0.0, saved_s=x.whole_s - x.part_s)


def ways_of(x: PlaceableLinear, link: Link, coder: RowCoder = EXACT) -> list[Candidate]:
    """All of a layer, dense first, placed last; rows only where they are fewer bytes than the gradient."""
    found = [dense(x.n * x.m * x.itemsize, link)]
    ring = found[0].sent
    rows = factors(x.n, x.m, x.rows, link, local_s=x.local_s, rebuild_s=x.rebuild_s, itemsize=x.itemsize)
    owned = owners(x.n, x.m, x.rows, link, local_s=x.local_s, itemsize=x.itemsize)
    return [*found, *(w for w in (rows, owned) if w.sent < ring), placed_way(x, link, coder)]


def decide(f: PlacementMeasurements, worth: float = WORTH, coder: RowCoder = EXACT) -> Considered:
    """The layers by which, as far as is predicted, steps are shortest; none, unless that is ``worth`` its share.

    What is not placed goes as a manager would choose it (:func:`commlib.planning.cost.choose.choose`). Layers are
    placed in the order of what that saves by itself, as many as make the shortest step; then each alone is looked at
    once more.
    """
    ways = {name: ways_of(x, f.link, coder) for name, x in f.layers.items()}
    p, every = f.seen(), {n: dense(nbytes, f.link) for n, (_, nbytes) in f.units.items()}

    def seconds(put: Collection[str]) -> float:
        left = {n: w for n, w in every.items() if n not in put}
        others = {n: w[1:-1] for n, w in ways.items() if n not in put}
        return choose(_without(p, put), left, others).seconds + sum(ways[n][-1].alone_s for n in put)

    gains = {n: min(w.alone_s + w.shared_s for w in found[:-1]) - found[-1].alone_s for n, found in ways.items()}
    order = sorted(gains, key=lambda n: -gains[n])  # all of them: one that gains nothing alone may shorten a step
    times = [seconds(order[:count]) for count in range(len(order) + 1)]
    put, shortest = order[: times.index(min(times))], min(times)
    for name in order:
        other = [n for n in put if n != name] if name in put else [*put, name]
        if (t := seconds(other)) < shortest:
            put, shortest = other, t
    if shortest > (1 - worth) * times[0]:
        put, shortest = [], times[0]
    return Considered(tuple(n for n in ways if n in put), ways, shortest, times[0], f.link)


def _without(p: TrainingPass, put: Collection[str]) -> TrainingPass:
    """The pass of a model without these layers' gradients."""
    kept = [Bucket(b.ready, tuple(n for n in b.layers if n not in put)) for b in p.buckets]
    return dataclasses.replace(p, buckets=tuple(b for b in kept if b.layers))
