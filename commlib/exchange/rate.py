"""Rates as people and ``tc`` write them: ``50mbit``."""

from __future__ import annotations

import re

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmg]?)bit(?:/s)?\s*", re.IGNORECASE)


def read_rate(text: str) -> float:
    """``"200mbit"`` → 2e8 bit/s. Decimal units as ``tc`` has them: bit, kbit, mbit, gbit.

    Raises:
        ValueError: no such rate.
    """
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f"a rate is a number and kbit, mbit or gbit, as 200mbit; got {text!r}")
    return float(match[1]) * _UNITS[match[2].lower()]


def show_rate(bits_per_second: float) -> str:
    """The shortest text that :func:`read_rate` reads back: 2e8 → ``"200mbit"``."""
    for unit in ("g", "m", "k"):
        if bits_per_second >= _UNITS[unit]:
            return f"{bits_per_second / _UNITS[unit]:g}{unit}bit"
    return f"{bits_per_second:g}bit"
