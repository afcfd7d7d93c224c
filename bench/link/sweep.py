"""How often each size is measured, and which are left out: a run has so many seconds. Pure functions.

Every rank calls them with the same figures (those of the slowest rank), so all decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST, MOST = 3, 50  # repetitions that count
UNTIMED = 2  # before them: one that touches the buffers, one that tells how long it takes
_OF_LINE = 10  # a tenth of the raw line is the least a collective gets: CPU-bound ones, and a chain over the ranks
_PROBE_AGAIN = 0.005  # of the seconds left: what takes less is probed twice more, and the quickest counts


def share(left: float, to_come: int, fair: float) -> float:
    """Seconds for the next of the operations to come: an equal part of what is left, never under a quarter of its
    fair part, so that one that took too long does not cost the last ones their figures.
    """
    return max(left / to_come, fair / 4)


def expected(size: int, known: Sequence[tuple[int, float]], line: float) -> float:
    """At most what a larger size should take, before it was tried.

    A line with α ≥ 0 grows no faster than its bytes; where latency still covers them, bytes add what they take at
    a tenth of the raw line.

    Args:
        size: bytes.
        known: (bytes, seconds) of smaller sizes.
        line: seconds a byte of the raw line.
    """
    return min(min(t * size / n, t + _OF_LINE * line * (size - n)) for n, t in known)


def affordable(each: float, known: Sequence[float], left: float) -> bool:
    """Whether a larger size can join those whose times (seconds) are known, with so many seconds left for all."""
    return UNTIMED * each + LEAST * (each + sum(known)) <= left


def repetitions(times: Sequence[float], left: float) -> list[list[int]]:
    """What to repeat, round by round: in each, how often every size is done.

    All sizes take part in every round, so that what slows the machine for a while slows all of them. The short
    ones are repeated within a round, for a quarter of the longest's time at most: they scatter most.

    Args:
        times: seconds of each size.
        left: seconds for all of it; the least number of rounds is done whatever it takes.

    Returns:
        For every round the counts, in the order of ``times``; over all rounds a size has 3 … 50.
    """
    longest = max(times)
    rounds = min(MOST, max(LEAST, int(left / max(sum(times), 1e-9))))
    while True:
        counts = [max(1, min(MOST // rounds, int(longest / 4 / max(t, 1e-9)))) for t in times]
        if rounds == LEAST or rounds * sum(c * t for c, t in zip(counts, times, strict=True)) <= left:
            return [counts] * rounds
        rounds -= 1


def probe_again(each: float, left: float) -> int:
    """How many more probes a size is worth: one alone may have waited for a core."""
    return 2 if each < _PROBE_AGAIN * left else 0


def share_needed(times: Sequence[float]) -> float:
    """The share into which all sizes just fit."""
    return (UNTIMED + LEAST) * sum(times)
