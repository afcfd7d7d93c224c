"""A flat tensor as blocks of equal length, of which some are sent; the last one may be shorter.

Nothing here waits for a device: no shape depends on which blocks are chosen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def magnitudes(flat: Tensor, block: int) -> Tensor:
    """Root mean square of every block, shape (blocks,): finite if all its values are, and only then.

    Where squares overflow (values from 1e19 on) it is the largest absolute value instead.

    Args:
        flat: (n,) float32.
        block: values in a block.
    """
    parts = [p for p in _parts(flat, block) if p.numel()]
    return torch.cat([_root_mean_square(p) for p in parts]) if parts else flat.new_empty(0)


def take(flat: Tensor, block: int, chosen: Tensor) -> Tensor:
    """Some blocks side by side, shape (len(chosen), block); what the short one lacks is zeros.

    Args:
        flat: (n,).
        block: values in a block.
        chosen: which, int64, none twice.
    """
    head, tail = _parts(flat, block)
    short = torch.nn.functional.pad(tail, (0, block - tail.shape[1]))
    if not len(head):
        return short[torch.zeros_like(chosen)]
    rows = head[chosen.clamp(max=len(head) - 1)]
    return torch.where((chosen == len(head))[:, None], short, rows) if tail.numel() else rows


def clear(flat: Tensor, block: int, chosen: Tensor) -> None:
    """Makes these blocks zero."""
    head, tail = _parts(flat, block)
    mask = torch.zeros(-(-len(flat) // block), 1, dtype=torch.bool, device=flat.device)
    mask[chosen] = True
    head.masked_fill_(mask[: len(head)], 0.0)
    if tail.numel():
        tail.masked_fill_(mask[len(head) :], 0.0)


def spread(values: Tensor, flat: Tensor, block: int, chosen: Tensor) -> None:
    """Overwrites ``flat``: what :func:`take` gave, in its places, and zeros elsewhere."""
    head, tail = _parts(flat, block)
    rows = torch.cat([values, values.new_zeros(1, block)])
    where = torch.full((-(-len(flat) // block),), len(values), device=flat.device)  # the row of zeros
    where[chosen] = torch.arange(len(values), device=flat.device)
    torch.index_select(rows, 0, where[: len(head)], out=head)
    if tail.numel():
        tail.copy_(rows[where[len(head) :], : tail.shape[1]])


def poison(sizes: Tensor) -> Tensor:
    """Zero, or NaN if any of the magnitudes is not finite."""
    return sizes.amax() * 0 if len(sizes) else sizes.new_zeros(())


def _parts(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The whole blocks, shape (blocks, block), and what is left, shape (1, < block)."""
    full = len(flat) // block
    return flat[: full * block].view(full, block), flat[full * block :].view(1, -1)


def _root_mean_square(rows: Tensor) -> Tensor:
    sizes: Tensor = torch.linalg.vector_norm(rows, dim=1) / math.sqrt(rows.shape[1])
    low, high = torch.aminmax(rows, dim=1)  # torch's ∞-norm takes ten times as long
    return torch.where(sizes.isfinite(), sizes, torch.maximum(high, -low))
