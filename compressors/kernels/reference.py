"""The codecs' loops as compositions of torch operators, for CPU and CUDA tensors alike.

Slow (each operator is a pass over memory) but plain: the faster kernels must equal these.
Nothing here synchronises with the host: no ``.item()``, no result whose shape depends on data.
All float tensors are float32, flat and contiguous; payloads are uint8 and start 8-byte aligned.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from commlib.compressor import store

# -- fields of b bits ---------------------------------------------------------------------------


def pack_bits(bits: Tensor) -> Tensor:
    """Booleans, shape (n,) → uint8, shape (⌈n/8⌉,); value i is bit i mod 8 of byte i div 8."""
    padded = F.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (padded * weights).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """The inverse of :func:`pack_bits`: booleans, shape (n,)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1)[:n].bool()


# -- blocks -------------------------------------------------------------------------------------


def blocks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """A flat tensor as rows of ``size`` values, shape (⌈n/size⌉, size); a copy only if the last row is short."""
    pad = -x.numel() % size
    return (F.pad(x, (0, pad), value=fill) if pad else x).view(-1, size)


# -- 1-bit with two means a column --------------------------------------------------------------


def two_means_encode(v: Tensor, payload: Tensor, column: int) -> None:
    """v, shape (n,) → float32 means (columns, 2) of v < 0 and v ≥ 0, then the bits v ≥ 0."""
    if not v.numel():
        return
    positive = v >= 0
    grid = blocks(v, column)
    upper = blocks(positive.float(), column)
    count = torch.full((grid.shape[0],), float(column), device=v.device)
    count[-1] = column - (-v.numel() % column)
    count_up = upper.sum(1)
    # where, not a product with the mask: 0·inf would put a NaN on the side that is finite
    sum_up = torch.where(upper > 0, grid, 0.0).sum(1)
    sum_low = torch.where(upper > 0, 0.0, grid).sum(1)
    means = torch.stack([sum_low / (count - count_up).clamp(min=1), sum_up / count_up.clamp(min=1)], dim=1)
    head = 4 * means.numel()
    payload[:head].view(torch.float32).copy_(means.view(-1))
    payload[head:].copy_(pack_bits(positive))


def two_means_decode(payload: Tensor, out: Tensor, column: int, *, add: bool, scale: float) -> None:
    """The inverse: each value becomes the mean of its side of its column."""
    n = out.numel()
    if not n:
        return
    columns = -(-n // column)
    head = 8 * columns
    means = payload[:head].view(torch.float32).view(columns, 2)
    bits = blocks(unpack_bits(payload[head:], n), column, fill=False)
    values = torch.where(bits, means[:, 1:], means[:, :1])
    store(values.view(-1)[:n], out, add=add, scale=scale)
