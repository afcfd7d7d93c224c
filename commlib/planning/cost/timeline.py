"""When a step ends whose layers are exchanged while the backward pass goes on. Pure functions.

Layers are numbered as the forward pass meets them; the backward pass finishes the last first. One link carries
them one after another, in the order in which they become ready (wait-free backpropagation: Poseidon, USENIX ATC
2017, section 3.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


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
        """What the transfers add to the backward pass."""
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
    """From the start of a backward pass to the end of the next forward pass, each layer of which waits only for its
    own transfer (SINGA 0.3's worker).
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
