"""Link rates, as people and ``tc`` write them, and the token bucket that makes one."""

from __future__ import annotations

import re

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_RATE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmg]?)bit(?:/s)?\s*", re.IGNORECASE)
LOWEST, HIGHEST = 64e3, 100e9  # bit/s: below, one packet takes a fifth of a second; above, no CPU keeps up

_FRAME = 1514  # bytes of the largest frame: MTU 1500 and the Ethernet header
# So long may a link send at once after a pause. Less is closer to a wire: a 64 kB message must not get through
# for nothing. But at a gigabit one segment as the kernel hands it over, 64 kB, must fit, or cutting it up takes
# more CPU than there is (docs/adr/0005-lab.md has the figures).
_BURST_S = 0.0006
_LARGEST_BURST = 256 << 10
_QUEUE_S = 0.2  # a full queue takes so long to drain: a switch with deep buffers, so that loss stays rare
_SHORTEST_QUEUE = 1 << 20


def parse_rate(text: str) -> float:
    """``"200mbit"`` → 2e8 bit/s. Decimal units as ``tc`` has them: bit, kbit, mbit, gbit.

    Raises:
        ValueError: no such rate, or one no link can be given.
    """
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f"a rate is a number and kbit, mbit or gbit, as 200mbit; got {text!r}")
    rate = float(match[1]) * _UNITS[match[2].lower()]
    if not LOWEST <= rate <= HIGHEST:
        raise ValueError(f"a link can have 64kbit to 100gbit, got {text!r}")
    return rate


def show_rate(bits_per_second: float) -> str:
    """The shortest text that :func:`parse_rate` reads back: 2e8 → ``"200mbit"``."""
    for unit in ("g", "m", "k"):
        if bits_per_second >= _UNITS[unit]:
            return f"{bits_per_second / _UNITS[unit]:g}{unit}bit"
    return f"{bits_per_second:g}bit"


def token_bucket(bits_per_second: float) -> str:
    """The arguments of ``tc … tbf`` for a link of this rate.

    The bucket holds two frames or 0.6 ms, whichever is more, so that a message is slowed from
    its first kilobytes on: a deep bucket would give short messages a rate the link does not have.
    """
    per_second = bits_per_second / 8
    burst = round(min(_LARGEST_BURST, max(2 * _FRAME, per_second * _BURST_S)))
    limit = round(max(_SHORTEST_QUEUE, per_second * _QUEUE_S))
    return f"rate {round(bits_per_second)}bit burst {burst}b limit {limit}b"
