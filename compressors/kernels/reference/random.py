"""Numbers drawn at random as functions of seed and position: the same on every device, in every kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def key(seed: int) -> tuple[int, int]:
    """(low, high) words of 32 bits that a seed stands for in :func:`hash32`: neighbouring seeds, distant keys."""
    mixed = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % (1 << 64)
    return mixed & 0xFFFFFFFF, mixed >> 32


def hash32(n: int, seed: int, device: torch.device) -> Tensor:
    """n pseudo-random whole numbers in [0, 2³²), int64, the same on *every* device and torch version.

    Number i is a mix of i and the 64-bit key of the seed by multiplications and shifts; every factor is below 2³¹, so
    no product leaves int64.
    """
    mask = 0xFFFFFFFF
    low, high = key(seed)
    x = (torch.arange(n, device=device) + low) & mask
    for factor in (0x45D9F3B, 0x7FEB352D, 0x45D9F3B):
        x = ((x ^ (x >> 16)) * factor) & mask
        x = x ^ high
    return x ^ (x >> 16)


def uniform(like: Tensor, seed: int) -> Tensor:
    """Float32 in [0, 1), multiples of 2⁻²⁴: number i of the seed for value i; the same on every device."""
    return ((hash32(like.numel(), seed, like.device) >> 8).float() * 2.0**-24).view_as(like)
