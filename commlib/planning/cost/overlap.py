"""When a step ends whose layers take given ways, from when they become ready. Pure.

One link carries transfers in the order in which they become ready (:mod:`commlib.planning.cost.overlap` is this for
one layer a bucket, all dense). What is computed when they have come through runs beside the backward pass, in the order
of the buckets; where ranks' cores are busy with the backward pass, it takes its time from that. Transfers do so, too:
while one is under way the pass is slower, by its *drag*.

When a step ends whose layers are exchanged while the backward pass goes on. Pure functions.

Layers are numbered as the forward pass meets them; the backward pass finishes the last first. One link carries
them one after another, in the order in which they become ready (wait-free backpropagation: Poseidon, USENIX ATC
2017, section 3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from commlib.planning.cost.route_cost import Candidate


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
class TrainingPass:
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


def finish(p: TrainingPass, ways: Mapping[str, Candidate]) -> float:
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


def exposed(p: TrainingPass, ways: Mapping[str, Candidate]) -> float:
    """Seconds that the exchange adds to the backward pass as it was."""
    return finish(p, ways) - p.end


def undisturbed(seen: TrainingPass, ways: Mapping[str, Candidate], drag: float) -> TrainingPass:
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
    return TrainingPass(buckets, rows, walk.came_to(seen.end), seen.spare_cores, drag)


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


def _events(p: TrainingPass, ways: Mapping[str, Candidate], rows: Collection[str] = ()) -> list[_Event]:
    """Events in their order; of ``rows`` even if nothing leaves or is saved then."""
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


def _as_seen(name: str, way: Candidate | None, seen: TrainingPass) -> Candidate:
    if way is None:
        return Candidate("dense", 0.0, 0.0, 0.0)
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


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Seconds since the backward pass began, by layer in the order of the forward pass.

    Attributes:
        ready: when a layer's gradient was.
        begin: when its transfer began.
        end: when it ended.
    """

    ready: tuple[float, ...]
    begin: tuple[float, ...]
    end: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The backward pass and all transfers."""
        return max((*self.ready, *self.end), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds that the transfers add to the backward pass."""
        return self.seconds - max(self.ready, default=0.0)


def overlap(backward: Sequence[float], wire: Sequence[float]) -> Timeline:
    """end_l = max(r_l, end_{l+1}) + c_l with r_l = Σ_{j ≥ l} b_j.

    Args:
        backward: b_l, seconds to compute the gradient of each layer.
        wire: c_l, seconds its transfer occupies the link; 0 for what is not sent.

    Raises:
        ValueError: they differ in length, or a time is negative.
    """
    _check(backward, wire)
    ready, begin, end = [], [], []
    computed = free = 0.0
    for b, c in zip(reversed(backward), reversed(wire), strict=True):
        computed += b
        start = max(computed, free)
        free = start + c
        ready.append(computed)
        begin.append(start)
        end.append(free)
    return Timeline(tuple(reversed(ready)), tuple(reversed(begin)), tuple(reversed(end)))


def step_seconds(forward: float, backward: Sequence[float], wire: Sequence[float]) -> float:
    """A step whose next forward pass waits for every layer, as DDP's does."""
    return forward + overlap(backward, wire).seconds


def just_in_time_seconds(forward: Sequence[float], backward: Sequence[float], wire: Sequence[float]) -> float:
    """Seconds from the start of a backward pass to the end of the next forward pass, each layer of which waits only for
    its own transfer (SINGA 0.3's worker).
    """
    _check(forward, backward)
    line = overlap(backward, wire)
    done = max(line.ready, default=0.0)  # the next forward pass begins after the backward pass
    for f, arrived in zip(forward, line.end, strict=True):
        done = max(done, arrived) + f
    return done


def first_first_seconds(forward: Sequence[float], backward: Sequence[float], wire: Sequence[float]) -> float:
    """The same over a link that always carries, of the layers that are ready, the one that is needed first, and lets it
    overtake: a priority link (section 1 of the recursion says that it changes the order only).
    """
    _check(forward, backward, wire)
    ready, left, end = overlap(backward, wire).ready, list(wire), list(overlap(backward, wire).ready)
    now = 0.0
    while any(x > 0 for x in left):
        waiting = [i for i, x in enumerate(left) if x > 0]
        here = [i for i in waiting if ready[i] <= now]
        later = min((ready[i] for i in waiting if ready[i] > now), default=float("inf"))
        if not here:
            now = later
            continue
        sent = min(left[here[0]], later - now)
        now += sent
        left[here[0]] = left[here[0]] - sent if sent < left[here[0]] else 0.0
        end[here[0]] = now
    done = max(ready, default=0.0)
    for f, arrived in zip(forward, end, strict=True):
        done = max(done, arrived) + f
    return done


def _check(*times: Sequence[float]) -> None:
    if len({len(t) for t in times}) > 1:
        raise ValueError(f"one time for every layer: got {', '.join(str(len(t)) for t in times)} of them")
    if any(x < 0 for t in times for x in t):
        raise ValueError("a time cannot be negative")
