"""When a step ends whose layers take given ways, from when they become ready. Pure.

One link carries transfers in the order in which they become ready (:mod:`commlib.planning.cost.timeline` is this for
one layer a bucket, all dense). What is computed when they have come through runs beside the backward pass, in the order
of the buckets; where ranks' cores are busy with the backward pass, it takes its time from that. Transfers do so, too:
while one is under way the pass is slower, by its *drag*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple

from commlib.planning.cost.route_cost import Way


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Layers that DDP hands over together.

    Args:
        ready: seconds from the step's begin until it does.
        layers: their names.
    """

    ready: float
    layers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward and backward pass, as it would be with every layer dense and the link not in use.

    Args:
        buckets: in the order in which they are handed over.
        rows: layer → seconds from the step's begin until its backward pass begins (only those with rows).
        end: seconds until the backward pass ends.
        spare_cores: whether what is computed for the exchange does not slow the backward pass down.
        drag: how many times as long the pass takes while the link is in use, at least 1.
    """

    buckets: tuple[Bucket, ...]
    rows: Mapping[str, float]
    end: float
    spare_cores: bool = False
    drag: float = 1.0


def finish(p: Pass, ways: Mapping[str, Way]) -> float:
    """Seconds from the step's begin until all has been exchanged.

    Args:
        p: the pass.
        ways: layer → its way, for every layer of every bucket.

    Raises:
        KeyError: a layer without a way, or an early one of which it is not known when its rows are there.
    """
    walk = _Walk(p.drag)
    through = [0.0] * len(p.buckets)
    for e in _events(p, ways):
        walk.go_to(e.at)
        walk.compute(e.before_s)
        through[e.bucket] = max(through[e.bucket], walk.send(e.link_s))
        walk.shift -= e.saved_s
    walk.go_to(p.end)
    after = [sum(ways[name].after_s for name in b.layers) for b in p.buckets]
    lane = 0.0
    for arrived, seconds in zip(through, after, strict=True):
        lane = max(lane, arrived) + seconds
    return max(lane, walk.now + (0.0 if p.spare_cores else sum(after)))


def exposed(p: Pass, ways: Mapping[str, Way]) -> float:
    """Seconds that the exchange adds to the backward pass as it was."""
    return finish(p, ways) - p.end


def undisturbed(seen: Pass, ways: Mapping[str, Way], drag: float) -> Pass:
    """The pass that a step's times come from: the reverse of what :func:`finish` makes of it.

    What a way has saved is put back, and what it has compressed between two buckets is taken out. (What was computed
    beside the pass is not: whether the cores did that or the backward pass first is not known.)

    Args:
        seen: with the times of the step.
        ways: layer → the way it took; one that is not there, nothing is known of.
        drag: of the pass.
    """
    walk, rows, ready = _Walk(drag), dict(seen.rows), [b.ready for b in seen.buckets]
    known = {name: _as_seen(name, ways.get(name), seen) for b in seen.buckets for name in b.layers}
    for e in _events(seen, known, rows):
        then = walk.came_to(e.at)
        if e.rows is None:
            ready[e.bucket] = then
        else:
            rows[e.rows] = then
        walk.compute(e.before_s)
        walk.send(e.link_s)
        walk.shift -= e.saved_s
    buckets = tuple(dataclasses.replace(b, ready=t) for b, t in zip(seen.buckets, ready, strict=True))
    return Pass(buckets, rows, walk.came_to(seen.end), seen.spare_cores, drag)


class _Event(NamedTuple):
    """Something of a bucket is ready: the rows of a layer, or all of it.

    Attributes:
        at: the time in the pass.
        bucket: its index.
        rows: the layer, or None.
        before_s: computed then.
        link_s: of the transfer that leaves then.
        saved_s: of the pass after it.
    """

    at: float
    bucket: int
    rows: str | None
    before_s: float = 0.0
    link_s: float = 0.0
    saved_s: float = 0.0


def _events(p: Pass, ways: Mapping[str, Way], rows: Collection[str] = ()) -> list[_Event]:
    """In their order; of ``rows`` even if nothing leaves or is saved then."""
    found = []
    for i, bucket in enumerate(p.buckets):
        own = [(name, ways[name]) for name in bucket.layers]
        for name, w in own:
            if w.early or w.saved_s or name in rows:
                early_s = w.link_s - w.late_s if w.early else 0.0
                found.append(_Event(p.rows[name], i, name, link_s=early_s, saved_s=w.saved_s))
        shared_s = sum({w.route: w.shared_s for _, w in own}.values())
        late_s = sum(w.late_s if w.early else w.link_s for _, w in own)
        found.append(_Event(bucket.ready, i, None, sum(w.before_s for _, w in own), shared_s + late_s))
    return sorted(found, key=lambda e: (e.at, e.rows is None))  # of one time, rows before buckets


def _as_seen(name: str, way: Way | None, seen: Pass) -> Way:
    if way is None:
        return Way("dense", 0.0, 0.0, 0.0)
    return way if name in seen.rows else dataclasses.replace(way, early=False, saved_s=0.0)


class _Walk:
    """Along a pass, and along the link beside it. What is at t in the pass is at t + ``shift`` in the step."""

    def __init__(self, drag: float) -> None:
        self.now, self.shift = 0.0, 0.0
        self._drag, self._free = drag, 0.0

    def go_to(self, then: float) -> None:
        """Computes as far as that time of the pass: at once, if more has been saved than is left to do."""
        self.compute(then + self.shift - self.now, ahead=False)

    def came_to(self, now: float) -> float:
        """The time of the pass at which it is now."""
        self.shift += (1 - 1 / self._drag) * min(max(0.0, now - self.now), self._in_use())
        self.now = max(self.now, now)
        return max(0.0, now - self.shift)

    def compute(self, seconds: float, *, ahead: bool = True) -> None:
        """Arithmetic; ``ahead``: that the pass has not."""
        if seconds <= 0:
            return
        longer = (self._drag - 1) * min(seconds, self._in_use() / self._drag)
        self.shift += longer + (seconds if ahead else 0.0)
        self.now += seconds + longer

    def send(self, seconds: float) -> float:
        """A transfer, which waits for those before it. When it is through; now, if there is none."""
        if seconds <= 0:
            return self.now
        self._free = max(self._free, self.now) + seconds
        return self._free

    def _in_use(self) -> float:
        """Seconds that the link will be from now on."""
        return max(0.0, self._free - self.now)
