"""When a step ends whose layers take given ways, from when they became ready in a step that was all dense. Pure.

One link carries transfers in the order in which they become ready (:mod:`commlib.timeline` is this for one layer a
bucket, all dense). What is computed when they have come through runs beside the backward pass, in the order of the
buckets; where ranks' cores are busy with the backward pass, it takes its time from that.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from commlib.price import Way


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Layers that DDP hands over together.

    Args:
        ready: seconds from the step's begin until it did.
        layers: their names.
    """

    ready: float
    layers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward and backward pass, as it was when every layer was dense.

    Args:
        buckets: in the order in which they were handed over.
        rows: layer → seconds from the step's begin until its backward pass began (only those with rows).
        end: seconds until the backward pass had ended.
        spare_cores: whether what is computed for the exchange does not slow the backward pass down.
    """

    buckets: tuple[Bucket, ...]
    rows: Mapping[str, float]
    end: float
    spare_cores: bool = False


def finish(p: Pass, ways: Mapping[str, Way]) -> float:
    """Seconds from the step's begin until all has been exchanged.

    Args:
        p: the pass.
        ways: layer → its way, for every layer of every bucket.

    Raises:
        KeyError: a layer without a way, or an early one of which it is not known when its rows were there.
    """
    clock = _Clock(p, ways)
    transfers: list[tuple[float, int, float]] = []  # ready, bucket, seconds
    ready_at, after = [], []
    for i, bucket in enumerate(p.buckets):
        own = [(name, ways[name]) for name in bucket.layers]
        ready = clock.now(bucket.ready) + sum(w.before_s for _, w in own)
        ready_at.append(ready)
        after.append(sum(w.after_s for _, w in own))
        shared = {w.route: w.shared_s for _, w in own}
        late = sum(w.late_s if w.early else w.link_s for _, w in own) + sum(shared.values())
        if late > 0:
            transfers.append((ready, i, late))
        transfers += [(clock.now(p.rows[name]), i, w.link_s - w.late_s) for name, w in own if w.early]
    through = list(ready_at)
    free = 0.0
    for ready, i, seconds in sorted(transfers):
        free = max(free, ready) + seconds
        through[i] = max(through[i], free)
    lane = 0.0
    for arrived, seconds in zip(through, after, strict=True):
        lane = max(lane, arrived) + seconds
    computed = clock.now(p.end) + (0.0 if p.spare_cores else sum(after))
    return max(lane, computed)


def exposed(p: Pass, ways: Mapping[str, Way]) -> float:
    """Seconds that the exchange adds to the backward pass as it was."""
    return finish(p, ways) - p.end


class _Clock:
    """When what happened at a time of the dense pass happens now: saved seconds earlier, computed ones later."""

    def __init__(self, p: Pass, ways: Mapping[str, Way]) -> None:
        changes = [(p.rows[n], -w.saved_s) for n, w in ways.items() if w.saved_s]
        changes += [(b.ready, ways[n].before_s) for b in p.buckets for n in b.layers if ways[n].before_s]
        changes.sort()
        self._times = [t for t, _ in changes]
        self._shift: Sequence[float] = [0.0, *itertools.accumulate(s for _, s in changes)]

    def now(self, then: float) -> float:
        return max(0.0, then + self._shift[bisect.bisect_left(self._times, then)])
