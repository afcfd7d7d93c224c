"""Model of a link: a collective takes α seconds, and β for every byte a rank sends. Pure.

The line a collective follows: t(n) = α + β·n. Pure functions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class AlphaBeta:
    """Seconds of a collective: ``alpha + beta · bytes``.

    Args:
        alpha: seconds it takes without any bytes.
        beta: seconds for each byte that a rank sends.

    Raises:
        ValueError: one of them is negative or not finite.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} of a link must be a number ≥ 0, got {getattr(self, name)!r}")

    def seconds(self, sent: float) -> float:
        """Seconds of a collective in which each rank sends so many bytes."""
        return self.alpha + self.beta * sent

    def slower(self, factor: float) -> AlphaBeta:
        """So many times as slow."""
        return AlphaBeta(factor * self.alpha, factor * self.beta)


@dataclasses.dataclass(frozen=True)
class Link:
    """The collectives a plan counts with, between ``world`` ranks.

    Bytes are those a rank *sends*: 2(P − 1)/P of a tensor for a ring all-reduce, P − 1 payloads for an all-gather.
    So on one link both have about the same β; their α differ.

    Args:
        world: P.
        all_reduce: of gradients.
        all_gather: of payloads.
        drag: how many times as long ranks' arithmetic takes while it is in use: transfers take of their cores.
        push_pull: of gradients to servers and back, if there are servers.

    Raises:
        ValueError: fewer than one rank; a drag below 1.
    """

    world: int
    all_reduce: AlphaBeta
    all_gather: AlphaBeta
    drag: float = 1.0
    push_pull: AlphaBeta | None = None

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"world size must be at least 1, got {self.world}")
        if not 1 <= self.drag < math.inf:
            raise ValueError(f"arithmetic takes at least as long while a link is in use, got a drag of {self.drag!r}")

    @classmethod
    def ring(cls, world: int, gbit_s: float, latency_s: float) -> Link:
        """Make the link of rings on full-duplex lines.

        Args:
            world: P.
            gbit_s: what a rank can send, Gbit/s.
            latency_s: of one message between neighbours.

        Raises:
            ValueError: no rank, a bandwidth that is not positive, a negative latency.
        """
        if not 0 < gbit_s < math.inf:
            raise ValueError(f"the bandwidth of a link must be more than 0 Gbit/s, got {gbit_s!r}")
        if not 0 <= latency_s < math.inf:
            raise ValueError(f"the latency of a link must be a number of seconds ≥ 0, got {latency_s!r}")
        if world < 1:
            raise ValueError(f"world size must be at least 1, got {world}")
        beta = 8 / (gbit_s * 1e9)
        return cls(world, AlphaBeta(2 * (world - 1) * latency_s, beta), AlphaBeta((world - 1) * latency_s, beta))

    def slower(self, factor: float) -> Link:
        """Link with every time of a transfer so many times as long."""
        reduce, gather = (x.slower(factor) for x in (self.all_reduce, self.all_gather))
        servers = self.push_pull and self.push_pull.slower(factor)
        return dataclasses.replace(self, all_reduce=reduce, all_gather=gather, push_pull=servers)

    @property
    def least_beta(self) -> float:
        """Smallest β of the link's lines."""
        return min(x.beta for x in (self.all_reduce, self.all_gather, self.push_pull) if x is not None)


FROM = 64_000
"""Bytes from which on the model is held to account: below, a message is mostly software."""
_SMALL = 1e-3  # weight of a point below FROM: enough to place α where the larger ones leave it open


@dataclasses.dataclass(frozen=True)
class AlphaBetaFit:
    """A line and how well it does.

    Attributes:
        alpha: seconds of a message of no bytes, ≥ 0.
        beta: seconds a byte, ≥ 0; 0 if the sizes are too small for their bytes to show.
        worst: largest |predicted/measured − 1| over the sizes ≥ :data:`FROM` (over all, if there are none).
        rms: root mean square of the same.
    """

    alpha: float
    beta: float
    worst: float
    rms: float

    def predict(self, size: float) -> float:
        """Seconds of a message of so many bytes."""
        return self.alpha + self.beta * size


def fit(points: Sequence[tuple[float, float]]) -> AlphaBetaFit:
    """The line with the smallest squared *relative* error, α ≥ 0, β ≥ 0.

    One point gives a line through nought. Points below 64 kB count a thousandth: α is what a message costs
    besides its bytes as large messages show it, not the time of the smallest.

    Args:
        points: (bytes > 0, seconds > 0), in any order.

    Raises:
        ValueError: no points, or a size or time that is not positive.
    """
    if not points:
        raise ValueError("a line needs at least one point")
    if not all(0 < n < math.inf and 0 < t < math.inf for n, t in points):
        raise ValueError(f"sizes and times must be positive, got {list(points)}")
    weights = [1.0 if n >= FROM else _SMALL for n, _ in points]
    # Divided by t, the model is a·x + b·y = 1 with x = 1/t, y = n/t: two unknowns, least squares.
    xs, ys = [1 / t for _, t in points], [n / t for n, t in points]
    alpha, beta = _non_negative(xs, ys, weights)
    judged = [(n, t) for n, t in points if n >= FROM] or list(points)
    errors = [(alpha + beta * n) / t - 1 for n, t in judged]
    return AlphaBetaFit(alpha, beta, max(map(abs, errors)), math.sqrt(sum(e * e for e in errors) / len(errors)))


def _non_negative(xs: Sequence[float], ys: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """(a, b) ≥ 0 that minimise Σ w (a·x + b·y − 1)²."""
    # In units in which both columns are of size one, or the determinant is all rounding error.
    sx, sy = max(xs), max(ys)
    rows = sorted((x / sx, y / sy, w) for x, y, w in zip(xs, ys, weights, strict=True))
    xx, yy = sum(w * x * x for x, _, w in rows), sum(w * y * y for _, y, w in rows)
    xy = sum(w * x * y for x, y, w in rows)
    x1, y1 = sum(w * x for x, _, w in rows), sum(w * y for _, y, w in rows)
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a, b = (yy * x1 - xy * y1) / determinant, (xx * y1 - xy * x1) / determinant
        if a >= 0 and b >= 0:
            return a / sx, b / sy
        if b < 0:
            return x1 / xx / sx, 0.0
    return 0.0, y1 / yy / sy
