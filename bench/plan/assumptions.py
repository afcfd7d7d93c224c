"""The figures a plan is made for, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

MOST_RANKS = 4096
RANKS = (1, 2, 4, 8, 16, 32)
_LEAST = 1e-6  # Gbit/s and TFLOP/s: below that, times are no numbers any more
_MOST_GBIT, _MOST_US, _MOST_TFLOPS, _MOST_BATCH = 100_000.0, 1e6, 100_000.0, 1_000_000


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Link and compute of a rank.

    Args:
        gbit: what a rank can send, and receive at the same time, Gbit/s (10⁹ bits).
        latency_us: of one message between two ranks, µs.
        tflops: what a rank sustains in products of matrices and convolutions, 10¹² FLOP/s.
        batch: examples a rank and step.

    Raises:
        ValueError: a figure that is out of range; the message names the option.
    """

    gbit: float = 10.0
    latency_us: float = 20.0
    tflops: float = 10.0
    batch: int = 32

    def __post_init__(self) -> None:
        _positive("--gbit", self.gbit, _MOST_GBIT, "what a rank can send, in Gbit/s")
        _positive("--tflops", self.tflops, _MOST_TFLOPS, "what a rank sustains, in TFLOP/s")
        if not 0 <= self.latency_us <= _MOST_US:
            raise ValueError(
                f"--latency-us must be from 0 to {_MOST_US:g} (of one message, in µs), got {self.latency_us:g}"
            )
        if not 1 <= self.batch <= _MOST_BATCH:
            raise ValueError(f"--batch must be from 1 to {_MOST_BATCH} examples a rank, got {self.batch}")

    @property
    def latency_s(self) -> float:
        """Latency of one message, seconds."""
        return self.latency_us * 1e-6

    def compute_s(self, flops: float) -> float:
        """Seconds that FLOPs take on a rank."""
        return flops / (self.tflops * 1e12)

    def words(self) -> str:
        """Assumptions in a line of words."""
        return f"{self.gbit:g} Gbit/s, {self.latency_us:g} µs, {self.tflops:g} TFLOP/s, batch {self.batch}"


def _positive(option: str, value: float, most: float, what: str) -> None:
    if not _LEAST <= value <= most:
        raise ValueError(f"{option} must be more than 0, from {_LEAST:g} to {most:g} ({what}), got {value:g}")


def parse_ranks(texts: Sequence[str] | None) -> tuple[int, ...]:
    """``["1,2", "8"]`` → (1, 2, 8): ascending, each once; :data:`RANKS` for nothing.

    Raises:
        ValueError: what is no number from 1 to :data:`MOST_RANKS`.
    """
    if not texts:
        return RANKS
    found = set()
    for text in ",".join(texts).split(","):
        try:
            ranks = int(text)
        except ValueError:
            raise ValueError(
                f"--ranks takes numbers from 1 to {MOST_RANKS}, as 8 or 1,2,4,8; got {text.strip()!r}"
            ) from None
        if not 1 <= ranks <= MOST_RANKS:
            raise ValueError(f"--ranks must be from 1 to {MOST_RANKS}, got {ranks}")
        found.add(ranks)
    return tuple(sorted(found))
