"""How fast this rank may send: a limit as the user gives it, and the token bucket that keeps it. Pure: no clock.

Rates as people and ``tc`` write them: ``50mbit``.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re

import torch

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


SMALLEST_BURST = 4096
"""Bytes: pieces of less would be all software."""
_BURST_S = 0.05  # the default burst takes so long at the limit's own rate …
_USUAL_BURST = 64 << 10  # … and is no smaller than this


@dataclasses.dataclass(frozen=True)
class RateLimit:
    """A cap on what one rank sends: in any window of time at most ``rate · window + burst`` payload bytes.

    For people who share a link: it changes when things leave and in how large pieces, not what is exchanged. A piece is
    one value to each rank at least: with so many ranks that this is more than a piece may be, it counts as the burst.

    Args:
        mbit: Mbit/s, decimal, of payload; headers of Gloo, TCP and Ethernet come on top.
        burst: bytes that may leave at once after a pause; by default what takes 50 ms, at least 65,536.

    Raises:
        ValueError: a rate that is not positive and finite, or a burst below 4,096 bytes.
    """

    mbit: float
    burst: int | None = None

    def __post_init__(self) -> None:
        mbit: object = self.mbit
        if isinstance(mbit, bool) or not isinstance(mbit, int | float) or not 0 < mbit < math.inf:
            raise ValueError(f"limit: mbit must be a number of Mbit/s > 0, got {mbit!r}; for no limit give None")
        given: object = self.burst
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < SMALLEST_BURST):
            raise ValueError(
                f"limit: burst must be a whole number of bytes ≥ {SMALLEST_BURST}, got {given!r}: smaller pieces "
                "cost more in software than they spare the link"
            )

    @classmethod
    def of(cls, given: RateLimit | str | None) -> RateLimit | None:
        """Read the limit that the user means: a limit, a rate as ``"50mbit"``, or None.

        Raises:
            ValueError: no rate, or one that is not positive.
            TypeError: something else.
        """
        if given is None or isinstance(given, RateLimit):
            return given
        if not isinstance(given, str):
            raise TypeError(f'limit is a rate as "50mbit" or a RateLimit(mbit=50), got {given!r}')
        try:
            rate = read_rate(given)
        except ValueError as e:
            raise ValueError(f"limit: {e}") from e
        if not rate > 0:
            raise ValueError(f"limit: a rate must be more than nothing, got {given!r}; for no limit give None")
        return cls(rate / 1e6)

    @property
    def bytes_s(self) -> float:
        """Bytes a second."""
        return self.mbit * 1e6 / 8

    @property
    def at_once(self) -> int:
        """Bytes of the burst, given or usual."""
        return max(_USUAL_BURST, round(self.bytes_s * _BURST_S)) if self.burst is None else self.burst

    def seconds(self, nbytes: float) -> float:
        """That so many bytes take."""
        return nbytes / self.bytes_s

    def __str__(self) -> str:
        return f"{show_rate(self.mbit * 1e6)}, bursts of {self.at_once} bytes"


class TokenBucket:
    """A token bucket: it says when the next bytes may leave.

    In any window of time, between any two grants, at most ``bytes_s · window + max(depth, largest grant)`` bytes are
    granted. A grant larger than the bucket waits until it is full, and leaves a debt.

    Args:
        bytes_s: what flows in.
        depth: what the bucket holds, bytes; it is full at first.

    Attributes:
        depth: as given; may be made smaller.
    """

    def __init__(self, bytes_s: float, depth: float) -> None:
        self._rate, self.depth = bytes_s, depth
        self._full = -math.inf  # when it will be full again, if nobody takes any more

    def take(self, now: float, nbytes: float) -> float:
        """Seconds from ``now`` until so many bytes may leave; they are counted as gone then.

        Args:
            now: seconds on any clock, never earlier than at the call before.
            nbytes: ≥ 0.
        """
        missing = self.depth - min(nbytes, self.depth)  # the bucket may lack so much, and still have enough
        granted = max(now, self._full - missing / self._rate)
        self._full = max(self._full, granted) + nbytes / self._rate
        return granted - now


def check_limit(limit: RateLimit | None, device: torch.device, timeout: datetime.timedelta) -> None:
    """Whether a limit can be kept.

    Args:
        limit: of rate, or None.
        device: where the gradients are.
        timeout: the process group's.

    Raises:
        ValueError: gradients that leave without the host; or ranks could miss each other for longer than the timeout.
    """
    if limit is None:
        return
    if device.type != "cpu":
        raise ValueError(
            f"limit: gradients on {device} leave without the host (NCCL), which cannot pace them; a limit needs them "
            "on the CPU, over Gloo. Shape the interface instead (tc), or give limit=None"
        )
    burst = limit.seconds(limit.at_once)
    if burst > timeout.total_seconds():
        raise ValueError(
            f"limit: at {limit.mbit:g} Mbit/s one burst of {limit.at_once} bytes takes {burst:.3g} s, longer than the "
            f"process group's time-out of {timeout.total_seconds():g} s: a rank whose turn comes late would be taken "
            "for lost. Give a smaller burst, a higher rate, or init_process_group(timeout=…)"
        )
