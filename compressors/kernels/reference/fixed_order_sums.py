"""Sums in a fixed order, as compositions of torch operators: a part of ``reference``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

BLOCK = 1024


def blocks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """A flat tensor as rows of ``size`` values, shape (⌈n/size⌉, size); a copy only if the last row is short."""
    pad = -x.numel() % size
    return (F.pad(x, (0, pad), value=fill) if pad else x).view(-1, size)


def fold(grid: Tensor) -> Tensor:
    """Sums of rows, shape (rows, width) → (rows,).

    1024 values are filled up with zeros and halved, the first half plus the second, until one is left; sums likewise.
    A sum of zeros is +0, whatever their signs.
    """
    count = 0
    while count != 1:
        count = max(1, -(-grid.shape[1] // BLOCK))
        parts = F.pad(grid, (0, count * BLOCK - grid.shape[1])).view(-1, count, BLOCK)
        while parts.shape[2] > 1:
            half = parts.shape[2] // 2
            parts = parts[:, :, :half] + parts[:, :, half:]
        grid = parts[:, :, 0]
    return grid[:, 0] + 0.0
