"""An orthonormal basis of a thin matrix's columns, as compositions of torch operators: a part of ``reference``.

Householder's reflections (Golub and Van Loan, *Matrix Computations*, §5.2), in float64: what columns have in common may
be all but a rounding error of theirs, and there is still a full basis. LAPACK's would be another on another processor,
and every rank of a job must have the same one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from commlib.compressors.kernels.reference.fixed_order_sums import fold


def orthonormal(p: Tensor, spare: Tensor) -> None:
    """Replaces the columns of ``p`` by an orthonormal basis of them.

    Args:
        p: (m, r) float32, m ≥ r, contiguous. A value that is not finite counts as zero.
        spare: (m, r) float32, columns in place of those that are zero.
    """
    given = torch.nan_to_num(p, nan=0.0, posinf=0.0, neginf=0.0)
    a = torch.where((given != 0).any(0), given, spare).t().double()  # a column of p is a row
    scales = [_reflect(a, j) for j in range(len(a))]
    for j in reversed(range(len(a))):
        v = a[j, j:].clone()
        a[j, :j] = 0
        _apply(v, scales[j], a[j + 1 :, j:])
        a[j, j:] = -(v * (scales[j] * v[0]))
        a[j, j] += 1
    p.copy_(a.t())


def _reflect(a: Tensor, j: int) -> Tensor:
    """Row j becomes the v of that reflection 1 − s·v·vᵀ which turns it to its own unit vector; later rows are turned.

    Returns:
        s; zero for a row of zeros, which needs no turning.
    """
    v = a[j, j:]
    norm, first = _root(fold((v * v)[None])[0]), v[0].clone()
    turned = norm * (norm + first.abs())
    s = torch.where(turned > 0, 1 / turned, 0.0)
    v[0] = first + torch.copysign(norm, first)
    _apply(v, s, a[j + 1 :, j:])
    return s


def _root(x: Tensor) -> Tensor:
    """The square root by Newton's iteration, from a power of two: PyTorch's own is not correctly rounded everywhere."""
    y = ((torch.frexp(x).exponent.long() // 2 + 1023) << 52).view(torch.float64)  # within a factor of √2
    for _ in range(6):
        y = (y + x / y) * 0.5
    return torch.where(x > 0, y, 0.0)


def _apply(v: Tensor, s: Tensor, rows: Tensor) -> None:
    """Every row less s·(v · row) times v."""
    if len(rows):
        rows -= (fold(v * rows) * s)[:, None] * v
