"""The line a collective follows: t(n) = α + β·n. Pure functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

FROM = 64_000
"""Bytes from which on the model is held to account: below, a message is mostly software."""
_SMALL = 1e-3  # weight of a point below FROM: enough to place α where the larger ones leave it open


@dataclasses.dataclass(frozen=True)
class Fit:
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


def fit(points: Sequence[tuple[float, float]]) -> Fit:
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
    return Fit(alpha, beta, max(map(abs, errors)), math.sqrt(sum(e * e for e in errors) / len(errors)))


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
