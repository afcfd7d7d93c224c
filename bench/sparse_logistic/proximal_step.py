"""The server's step on a block of weights, with L1: pure.

Each weight goes to where its quadratic model and l1·|w| have their smallest sum, but not further than its reach: the
reach of a weight that moves grows, that of one that rests shrinks. So in DBPG of Li et al., "Communication Efficient
Distributed Machine Learning with the Parameter Server" (NIPS 2014), after the step of LIBLINEAR's newGLMNET.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIRST_REACH, LARGEST_REACH, REST = 1.0, 5.0, 0.1
_AT_LEAST = 1e-10  # curvature of a feature that has none


def step(w: Tensor, g: Tensor, u: Tensor, reach: Tensor, *, l1: float, eta: float = 1.0) -> tuple[Tensor, Tensor]:
    """New weights, float32 (n,), and their new reaches, float64 (n,).

    With u ← u/η + 1e-10 the step d is -(g + λ)/u where g + λ ≤ u·w, -(g - λ)/u where g - λ ≥ u·w, else -w, to exactly
    0; and |d| at most the reach.

    Args:
        w: weights, float32 (n,).
        g: gradient of the loss's sum over all examples, float64 (n,).
        u: upper bound of its curvature for a step within reach, float64 (n,), ≥ 0.
        reach: float64 (n,), above 0.
        l1: λ, in units of the sum of losses.
        eta: η, above 0; less than 1 for shorter steps, as delays need.
    """
    old, u = w.double(), u / eta + _AT_LEAST
    d = torch.where(g + l1 <= u * old, -(g + l1) / u, torch.where(g - l1 >= u * old, -(g - l1) / u, -old))
    new = (old + d.clamp(-reach, reach)).float()
    return new, reach_after(old, new)


def reach_after(old: Tensor, new: Tensor) -> Tensor:
    """min(5, 2·|d| + 0.1), float64 (n,), of a weight that went from old to new; workers and servers see the same."""
    return (2 * (new.double() - old.double()).abs() + REST).clamp_(max=LARGEST_REACH)


def violation(w: Tensor, g: Tensor, l1: float) -> float:
    """Amount by which |g| is beyond λ at most, over weights that are 0; 0.0 if nowhere."""
    beyond = (g.abs() - l1)[w == 0]
    return max(0.0, float(beyond.max())) if beyond.numel() else 0.0


def relative_change(before: float, now: float) -> float:
    """Change of an objective from pass to pass, against what it was; NaN never counts as small."""
    if before == now:
        return 0.0
    return abs(before - now) / abs(before) if before and math.isfinite(before) else math.inf
