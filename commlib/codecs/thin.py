"""Products with a thin matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from commlib.runtime.scratch import scratch


def thin_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out`` = a·b for a ``b`` of few columns, as (bᵀ·aᵀ)ᵀ: from that side BLAS is two to ten times as fast.

    Args:
        a: (m, n) float32, or a transposed view of such.
        b: (n, r), r much smaller.
        out: (m, r), contiguous.
    """
    found = scratch("thin", (b.shape[1], a.shape[0]), a.dtype, a.device)
    out.copy_(torch.matmul(b.t(), a.t(), out=found).t())
