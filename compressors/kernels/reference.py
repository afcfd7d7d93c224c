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
from commlib.compressors.kernels import bits
from commlib.compressors.kernels.bits import pack_bits, unpack_bits

__all__ = [
    "blocks", "hash32", "levels_decode", "linear_encode", "natural_decode", "natural_encode", "norm_encode",
    "pack_bits", "power_of_two", "strata", "ternary_decode", "ternary_encode", "two_means_decode",
    "two_means_encode", "unpack_bits",
]  # fmt: skip

# -- blocks and randomness ----------------------------------------------------------------------


def blocks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """A flat tensor as rows of ``size`` values, shape (⌈n/size⌉, size); a copy only if the last row is short."""
    pad = -x.numel() % size
    return (F.pad(x, (0, pad), value=fill) if pad else x).view(-1, size)


def _uniform(like: Tensor, seed: int) -> Tensor:
    """Float32 in [0, 1), multiples of 2⁻²⁴; the same for the same seed, shape and kind of device."""
    generator = torch.Generator(device=like.device).manual_seed(seed)
    return torch.rand(like.shape, generator=generator, device=like.device)


def _round_at_random(y: Tensor, seed: int) -> Tensor:
    """y ≥ 0 rounded up with probability y − ⌊y⌋, else down."""
    low = y.floor()
    return low + (_uniform(y, seed) < y - low)


def _finite(y: Tensor) -> Tensor:
    """Zero where not finite: a NaN cast to an integer is undefined; the scale beside it carries the NaN."""
    return torch.nan_to_num(y, nan=0.0, posinf=0.0, neginf=0.0)


def _divisor(x: Tensor) -> Tensor:
    """x, or 1 where it is zero or NaN."""
    return torch.where(x > 0, x, 1.0)


def hash32(n: int, seed: int, device: torch.device) -> Tensor:
    """n pseudo-random whole numbers in [0, 2³²), int64, the same on *every* device and torch version.

    For codecs that need all ranks to draw alike. Number i is a mix of i and the 64-bit seed by
    multiplications and shifts; every factor is below 2³¹, so no product leaves int64.
    """
    mask = 0xFFFFFFFF
    key = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % (1 << 64)  # neighbouring seeds, distant keys
    x = (torch.arange(n, device=device) + (key & mask)) & mask
    for factor in (0x45D9F3B, 0x7FEB352D, 0x45D9F3B):
        x = ((x ^ (x >> 16)) * factor) & mask
        x = x ^ (key >> 32)
    return x ^ (x >> 16)


# -- 1-bit with two means a column --------------------------------------------------------------


def two_means_encode(v: Tensor, payload: Tensor, column: int) -> None:
    """v, shape (n,) → float32 means (columns, 2) of v < 0 and v ≥ 0, then the bits v ≥ 0."""
    if not v.numel():
        return
    positive = v >= 0
    grid = blocks(v, column)
    count = torch.full((grid.shape[0],), float(column), device=v.device)
    count[-1:].fill_(column - (-v.numel() % column))
    count_up = blocks(positive.float(), column).sum(1)
    # clamped, not multiplied with the mask: 0·inf would put a NaN on the side that is finite
    sum_up, sum_low = grid.clamp(min=0).sum(1), grid.clamp(max=0).sum(1)
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
    upper = blocks(unpack_bits(payload[head:], n).float(), column)
    # products with 0 and 1 are exact; a where() that broadcasts takes ten times as long on a CPU
    values = (upper * means[:, 1:]).add_((1 - upper).mul_(means[:, :1]))
    store(values.view(-1)[:n], out, add=add, scale=scale)


# -- a scale and whole levels −L … L a block ----------------------------------------------------


def linear_encode(x: Tensor, payload: Tensor, block: int, levels: int) -> None:
    """Scale = the block's absmax; level = x/absmax·L, rounded half to even."""
    grid = blocks(x, block)
    absmax = grid.abs().amax(1)
    _write_levels(torch.round(_finite(grid / _divisor(absmax)[:, None]) * levels), absmax, x.numel(), payload, levels)


def norm_encode(x: Tensor, payload: Tensor, block: int, levels: int, seed: int) -> None:
    """Scale = the block's Euclidean norm; level = sgn(x)·(|x|/norm·L rounded at random), unbiased."""
    grid = blocks(x, block)
    absmax = grid.abs().amax(1)
    unit = grid / _divisor(absmax)[:, None]  # squares of x itself would overflow from 2⁶⁴ on
    length = unit.square().sum(1).sqrt()
    share = _finite(unit.abs() / length.clamp(min=1)[:, None]).clamp_(max=1)
    level = _round_at_random(share * levels, seed).copysign(unit)
    _write_levels(level, absmax * length, x.numel(), payload, levels)


def _write_levels(level: Tensor, scales: Tensor, n: int, payload: Tensor, levels: int) -> None:
    head = 4 * scales.numel()
    payload[:head].view(torch.float32).copy_(scales)
    codes = (level + levels).view(-1)[:n].to(torch.int32)
    payload[head:].copy_(bits.pack_fields(codes, (2 * levels).bit_length()))


def levels_decode(payload: Tensor, out: Tensor, block: int, levels: int, *, add: bool, scale: float) -> None:
    """Level/L·scale of the block."""
    n = out.numel()
    head = 4 * -(-n // block)
    codes = bits.unpack_fields(payload[head:], n, (2 * levels).bit_length())
    # the share first: L/L is exactly 1, so the largest value of a block comes back exactly
    share = blocks((codes - levels).float() / levels, block)
    values = share * payload[:head].view(torch.float32)[:, None]
    store(values.view(-1)[:n], out, add=add, scale=scale)


# -- −max, 0, max -------------------------------------------------------------------------------


def ternary_encode(x: Tensor, payload: Tensor, block: int, seed: int) -> None:
    """Scale = the block's absmax; trit = 1 + sgn(x) with probability |x|/absmax, else 1."""
    grid = blocks(x, block)
    absmax = grid.abs().amax(1)
    share = _finite(grid.abs() / _divisor(absmax)[:, None])
    trits = 1 + torch.sign(grid).nan_to_num_(nan=0.0) * (_uniform(share, seed) < share)
    head = 4 * absmax.numel()
    payload[:head].view(torch.float32).copy_(absmax)
    payload[head:].copy_(bits.pack_trits(trits.view(-1)[: x.numel()]))


def ternary_decode(payload: Tensor, out: Tensor, block: int, *, add: bool, scale: float) -> None:
    """(trit − 1)·absmax of the block."""
    n = out.numel()
    head = 4 * -(-n // block)
    signs = blocks(bits.unpack_trits(payload[head:], n).float() - 1, block)
    values = signs * payload[:head].view(torch.float32)[:, None]
    store(values.view(-1)[:n], out, add=add, scale=scale)


# -- powers of two ------------------------------------------------------------------------------


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two ≤ x ≥ 0, exactly; 0 for 0, NaN for a non-finite x."""
    mantissa, _ = torch.frexp(x)
    return torch.where(x == 0, x, x / (2 * mantissa))


def natural_encode(x: Tensor, payload: Tensor, seed: int) -> None:
    """Scale = the largest power of two ≤ absmax; byte = sign·128 + c, where c > 0 stands for scale·2^(c−126)."""
    scale = power_of_two(x.abs().amax())
    y = _finite(x.abs() / scale)  # exact, in [0, 2)
    mantissa, exponent = torch.frexp(y)
    below = y < 2.0**-125  # smaller than code 1: rounded at random to it or to zero
    chance_up = torch.where(below, y * 2.0**125, 2 * mantissa - 1)
    code = torch.where(below, 0, exponent + 125) + (_uniform(y, seed) < chance_up)
    payload[:4].view(torch.float32).copy_(scale.view(1))
    payload[4:].copy_(code + 128 * (x < 0))


def natural_decode(payload: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
    """±scale·2^(c−126), and zero for c = 0."""
    code = payload[4:].to(torch.int32)
    c = code & 127
    magnitude = ((c + 1) << 23).view(torch.float32)  # the bits of 2^(c−126)
    signed = torch.where(code > 127, -magnitude, magnitude)
    values = torch.where(c > 0, signed, 0.0) * payload[:4].view(torch.float32)
    store(values, out, add=add, scale=scale)


# -- one index in each of k strata --------------------------------------------------------------


def strata(n: int, k: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One uniformly random index of each of k consecutive strata that differ by at most one in size.

    Returns:
        (indices, sizes of their strata), int64, shape (k,) each; the same on every device.
    """
    edges = torch.arange(k + 1, device=device) * n // k
    sizes = edges[1:] - edges[:-1]
    return edges[:-1] + (hash32(k, seed, device) * sizes >> 32), sizes
