"""Message sizes as people write them, and the ladder of those that are measured. Decimal: 1 MB is 10⁶ bytes."""

from __future__ import annotations

import re

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
