"""How often each size is measured, and which are left out: a run has so many seconds. Pure functions.

Every rank calls them with the same figures (those of the slowest rank), so all decide alike.

Message sizes as people write them, and the ladder of those that are measured. Decimal: 1 MB is 10⁶ bytes.
"""

from __future__ import annotations

import re
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
    """Repetitions, round by round: in each, how often every size is done.

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


_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kMG]?)B?\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3}
_RUNGS = tuple(rung * unit for unit in (1, 1000, 1000**2, 1000**3) for rung in (1, 4, 16, 64, 256))
_LARGEST = 4 * 1000**3


def parse_size(text: str) -> int:
    """``"64kB"`` → 64000.

    Raises:
        ValueError: no size, or none a message can have.
    """
    match = _SIZE.fullmatch(text)
    size = round(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 4 <= size <= _LARGEST:
        raise ValueError(f"a message size is a number and B, kB, MB or GB, from 4B to 4GB, as 64kB; got {text!r}")
    return size


def show_size(size: int) -> str:
    """64000 → ``"64 kB"``; a size that was rounded up to a multiple of the ranks still reads as what was asked."""
    for name, unit in (("GB", 1000**3), ("MB", 1000**2), ("kB", 1000)):
        if size >= unit:
            value = size / unit
            rounded = abs(value - round(value)) <= 0.02 * value
            return f"{value:.0f} {name}" if rounded else f"{value:.3g} {name}"
    return f"{size} B"


def ladder(smallest: int, largest: int) -> list[int]:
    """Both ends and 1, 4, 16, 64, 256 times the powers of a thousand between them, ascending.

    Raises:
        ValueError: the ends are the wrong way round.
    """
    if smallest > largest:
        raise ValueError(f"--min {show_size(smallest)} is larger than --max {show_size(largest)}")
    return sorted({smallest, largest, *(r for r in _RUNGS if smallest < r < largest)})


def whole(size: int, ranks: int) -> int:
    """The size rounded up so that every rank's part is a whole number of float32 values."""
    unit = 4 * ranks
    return -(-size // unit) * unit
