"""Whether a step counts, said by all ranks and heard alike by all. Pure.

A rank sees the mean gradients of its own part only. So each says whether these are finite, the sum of their squares,
and which parameters had a gradient on it; what follows from all that is the same everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Verdict:
    """On a step.

    Attributes:
        finite: whether the mean gradients are; if not, it does not count.
        norm: of all of them, the root of the sum of squares.
        used: for every parameter, whether any rank had a gradient of it.
    """

    finite: bool
    norm: float
    used: tuple[bool, ...]


def said(finite: bool, squares: float, used: Sequence[bool], device: torch.device) -> Tensor:
    """One rank's part, (16 + parameters,) uint8."""
    numbers = torch.tensor([float(finite), squares], dtype=torch.float64).view(torch.uint8)
    return torch.cat([numbers, torch.tensor(list(used), dtype=torch.uint8)]).to(device)


def heard(parts: Tensor) -> Verdict:
    """From all ranks' parts, (P, 16 + parameters), added in rank order."""
    numbers = [row[:16].clone().view(torch.float64).tolist() for row in parts.cpu()]
    used = parts[:, 16:].any(0).tolist()
    norm = math.sqrt(sum(squares for _, squares in numbers))
    return Verdict(all(finite for finite, _ in numbers), norm, tuple(used))


def square(values: Tensor) -> float:
    """The sum of squares; in double precision where it would overflow."""
    root = float(torch.linalg.vector_norm(values))
    return root**2 if math.isfinite(root) else float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
