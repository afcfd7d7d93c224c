"""Rates that a link of the lab can have, and the token bucket that makes one."""

from __future__ import annotations

from commlib.exchange.rate import read_rate
from commlib.exchange.rate import show_rate as show_rate

LOWEST, HIGHEST = 64e3, 100e9  # bit/s: below, one packet takes a fifth of a second; above, no CPU keeps up

_FRAME = 1514  # bytes of the largest frame: MTU 1500 and the Ethernet header
# So long may a link send at once after a pause: as close to a wire as late timers allow, or a short message
# gets through for nothing (docs/adr/0005-lab.md has the figures).
_BURST_S = 0.0002
_LARGEST_SEGMENT = 65536  # that the kernel hands to an interface, and has by default
_QUEUE_S = 0.2  # a full queue takes so long to drain: a switch with deep buffers, so that loss stays rare
_SHORTEST_QUEUE = 1 << 20


def parse_rate(text: str) -> float:
    """``"200mbit"`` → 2e8 bit/s, as :func:`commlib.exchange.rate.read_rate` has it.

    Raises:
        ValueError: no such rate, or one no link can be given.
    """
    rate = read_rate(text)
    if not LOWEST <= rate <= HIGHEST:
        raise ValueError(f"a link can have 64kbit to 100gbit, got {text!r}")
    return rate


def burst(bits_per_second: float) -> int:
    """Bytes a link of this rate may send at once: two frames or 0.2 ms, whichever is more.

    A deep bucket would give short messages a rate the link does not have.
    """
    return round(max(2 * _FRAME, bits_per_second / 8 * _BURST_S))


def segment(bits_per_second: float | None) -> int:
    """Bytes of the largest segment TCP may hand to the interface (headers included); None: no limit of rate.

    Two thirds of the bucket. What does not fit would have to be cut up in software, for which there is not the CPU;
    the last third makes up for a timer that is late.
    """
    return _LARGEST_SEGMENT if bits_per_second is None else min(_LARGEST_SEGMENT, burst(bits_per_second) * 2 // 3)


def token_bucket(bits_per_second: float) -> str:
    """The arguments of ``tc … tbf`` for a link of this rate."""
    limit = round(max(_SHORTEST_QUEUE, bits_per_second / 8 * _QUEUE_S))
    return f"rate {round(bits_per_second)}bit burst {burst(bits_per_second)}b limit {limit}b"
