"""The codecs' loops as compositions of torch operators, for CPU and CUDA tensors alike.

Slow (each operator is a pass over memory) but plain: the faster kernels must equal these, bit for bit. So every float
operation here has one result: sums are additions in a fixed order (:func:`fold`), random numbers a function of seed and
position (:func:`hash32`), and nothing is left to an operator that may fuse or reorder.
Nothing here synchronises with the host: no ``.item()``, no result whose shape depends on data.
All float tensors are float32, flat and contiguous; payloads are uint8 and start 8-byte aligned.

An ``encode`` with a :class:`Carry` encodes x + carry.old, and leaves in carry.new what was not sent of it, both float32
or bfloat16. A ``decode``
takes the payloads of several ranks, shape (P, bytes), and adds them in order of rank.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.base import store
from commlib.codecs.slots import Carry
from commlib.compressors.kernels.reference import bitpack
from commlib.compressors.kernels.reference.bitpack import pack_bits, unpack_bits
from commlib.compressors.kernels.reference.fixed_order_sums import blocks, fold
from commlib.compressors.kernels.reference.orthonormal import orthonormal
from commlib.compressors.kernels.reference.random import uniform
from commlib.compressors.kernels.reference.topk import (
    largest,
    largest_moved,
    places_add,
    places_decode,
    places_encode,
    strata,
)

__all__ = [
    "cast_decode", "cast_encode", "inverse", "largest", "largest_moved", "levels_decode", "linear_encode",
    "name", "natural_decode", "natural_encode", "norm_encode", "orthonormal", "places_add", "places_decode",
    "places_encode", "power_of_two", "sign_decode", "sign_encode", "strata", "ternary_decode",
    "ternary_encode", "two_means_decode", "two_means_encode",
]  # fmt: skip

name = "reference"


def _round_at_random(y: Tensor, seed: int) -> Tensor:
    """y ≥ 0 rounded up with probability y − ⌊y⌋, else down."""
    low = y.floor()
    return low + (uniform(y, seed) < y - low)


def _normal(v: Tensor, absmax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values over the largest power of two ≤ absmax, exactly: of magnitude below 2.

    Args:
        v: shape (blocks, block).
        absmax: of each block, shape (blocks,).

    Returns:
        (units, the unit of absmax in [1, 2), the power), of the shapes of v, absmax and absmax. Units are zero where
        absmax is zero or not finite; the power is NaN where it is not.
    """
    up = torch.where(absmax < 2.0**-64, absmax.new_tensor(2.0**64), 1.0)  # or 1/power might be infinite
    raised = absmax * up
    usable = (raised > 0) & raised.isfinite()
    power = power_of_two(torch.where(usable, raised, 1.0))
    down = torch.where(usable, 1 / power, 0.0)
    units = torch.nan_to_num(v * up[:, None] * down[:, None], nan=0.0)
    return units, torch.where(usable, raised * down, 0.0), torch.where(absmax.isfinite(), power / up, torch.nan)


def _joined(x: Tensor, carry: Carry | None) -> Tensor:
    if carry is None:
        return x
    return torch.add(x, carry.old.view(-1), out=None if carry.short else carry.new.view(-1))


def _left(v: Tensor, carry: Carry) -> None:
    """Keep what was not sent; float32 of it *is* the new residual."""
    if carry.short:
        residuals.shorten(v, carry.new, carry.up)


# -- shorter formats ----------------------------------------------------------------------------


def cast_encode(x: Tensor, payload: Tensor, wire: torch.dtype, carry: Carry | None = None) -> None:
    """x, shape (n,), rounded to the nearest in ``wire``, half to even."""
    v = _joined(x, carry)
    payload.view(wire).copy_(v)
    if carry is not None:
        cast_decode(payload[None], v, wire, add=True, scale=-1.0)
        _left(v, carry)


def cast_decode(payloads: Tensor, out: Tensor, wire: torch.dtype, *, add: bool, scale: float) -> None:
    """The inverse; widened first, for scaling in the short format would round a second time."""
    for p, payload in enumerate(payloads):
        store(payload.view(wire).to(out.dtype), out, add=add or p > 0, scale=scale)


# -- 1-bit --------------------------------------------------------------------------------------


def two_means_encode(x: Tensor, payload: Tensor, column: int, carry: Carry | None = None) -> None:
    """x, shape (n,) → float32 means (columns, 2) of x < 0 and x ≥ 0, then the bits x ≥ 0. NaN counts as below zero."""
    if not x.numel():
        return
    v = _joined(x, carry)
    positive = v >= 0
    count = torch.full((-(-v.numel() // column),), column, dtype=torch.int64, device=v.device)
    count[-1:].fill_(column - (-v.numel() % column))
    count_up = blocks(positive.to(torch.int64), column).sum(1)
    sum_up, sum_low = (fold(blocks(torch.where(side, v, 0.0), column)) for side in (positive, ~positive))
    means = torch.stack([sum_low / (count - count_up).clamp(min=1), sum_up / count_up.clamp(min=1)], dim=1)
    head = 4 * means.numel()
    payload[:head].view(torch.float32).copy_(means.view(-1))
    payload[head:].copy_(pack_bits(positive))
    if carry is not None:
        two_means_decode(payload[None], v, column, add=True, scale=-1.0)
        _left(v, carry)


def two_means_decode(payloads: Tensor, out: Tensor, column: int, *, add: bool, scale: float) -> None:
    """The inverse: each value becomes the mean of its side of its column."""
    n = out.numel()
    if not n:
        return
    head = 8 * -(-n // column)
    for p, payload in enumerate(payloads):
        means = payload[:head].view(torch.float32).view(-1, 2)
        upper = blocks(unpack_bits(payload[head:], n), column, fill=False)
        values = torch.where(upper, means[:, 1:].expand_as(upper), means[:, :1].expand_as(upper))
        store(values.view(-1)[:n], out, add=add or p > 0, scale=scale)


def sign_encode(x: Tensor, payload: Tensor, carry: Carry | None = None) -> None:
    """x, shape (n,) → the mean of |x| as float32, then the bits x ≥ 0."""
    if not x.numel():
        return
    v = _joined(x, carry)
    count = torch.full((), v.numel(), dtype=torch.int64, device=v.device)
    mean = fold(v.abs()[None]) / count  # a Python number may round twice
    payload[:4].view(torch.float32).copy_(mean)
    payload[4:].copy_(pack_bits(v >= 0))
    if carry is not None:
        sign_decode(payload[None], v, add=True, scale=-1.0)
        _left(v, carry)


def sign_decode(payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
    """Decode signs to ± the mean."""
    if not out.numel():
        return
    for p, payload in enumerate(payloads):
        signs = unpack_bits(payload[4:], out.numel()).float().mul_(2).sub_(1)
        store(signs.mul_(payload[:4].view(torch.float32)), out, add=add or p > 0, scale=scale)


# -- a scale and whole levels −L … L a block ----------------------------------------------------


def linear_encode(x: Tensor, payload: Tensor, block: int, levels: int, carry: Carry | None = None) -> None:
    """Scale = the block's absmax; level = x·(L/absmax), rounded half to even."""
    v = _joined(x, carry)
    grid = blocks(v, block)
    absmax = grid.abs().amax(1)
    units, largest_unit, _ = _normal(grid, absmax)
    level = torch.round(units * _over(levels, largest_unit.clamp(min=1))[:, None])
    _write_levels(level, absmax, v, payload, levels)
    if carry is not None:
        levels_decode(payload[None], v, block, levels, add=True, scale=-1.0)
        _left(v, carry)


def norm_encode(x: Tensor, payload: Tensor, block: int, levels: int, seed: int, carry: Carry | None = None) -> None:
    """Scale = the block's Euclidean norm; level = sgn(x)·(|x|/norm·L rounded at random), unbiased."""
    v = _joined(x, carry)
    grid = blocks(v, block)
    absmax = grid.abs().amax(1)
    units, _, power = _normal(grid, absmax)  # squares of x itself would overflow from 2⁶⁴ on
    length = fold(units * units).double().sqrt().float()  # that of float32 is not correctly rounded everywhere
    share = (units.abs() * _over(levels, length.clamp(min=1))[:, None]).clamp_(max=levels)
    level = _round_at_random(share, seed).copysign(units)
    _write_levels(level, length * power, v, payload, levels)
    if carry is not None:
        levels_decode(payload[None], v, block, levels, add=True, scale=-1.0)
        _left(v, carry)


def _over(number: int, y: Tensor) -> Tensor:
    """number/y, rounded once: torch takes 1/y times a Python number."""
    return torch.full_like(y, number) / y


@functools.cache
def inverse(levels: int) -> float:
    """1/L in float32."""
    return float(1 / torch.tensor(float(levels), dtype=torch.float32))


def _write_levels(level: Tensor, scales: Tensor, v: Tensor, payload: Tensor, levels: int) -> None:
    head = 4 * scales.numel()
    payload[:head].view(torch.float32).copy_(scales)
    codes = (level + levels).view(-1)[: v.numel()].to(torch.int32)
    payload[head:].copy_(bitpack.pack_fields(codes, (2 * levels).bit_length()))


def levels_decode(payloads: Tensor, out: Tensor, block: int, levels: int, *, add: bool, scale: float) -> None:
    """Level·(1/L)·scale of the block; for L = 7 and 127 level L is exactly the scale."""
    n = out.numel()
    head = 4 * -(-n // block)
    for p, payload in enumerate(payloads):
        codes = bitpack.unpack_fields(payload[head:], n, (2 * levels).bit_length())
        share = blocks((codes - levels).float() * inverse(levels), block)
        values = share * payload[:head].view(torch.float32)[:, None]
        store(values.view(-1)[:n], out, add=add or p > 0, scale=scale)


# -- −max, 0, max -------------------------------------------------------------------------------


def ternary_encode(x: Tensor, payload: Tensor, block: int, seed: int, carry: Carry | None = None) -> None:
    """Scale = the block's absmax; trit = 1 + sgn(x) with probability |x|/absmax, else 1."""
    v = _joined(x, carry)
    grid = blocks(v, block)
    absmax = grid.abs().amax(1)
    units, largest_unit, _ = _normal(grid, absmax)
    trits = 1 + torch.sign(units) * (uniform(units, seed) * largest_unit[:, None] < units.abs())
    head = 4 * absmax.numel()
    payload[:head].view(torch.float32).copy_(absmax)
    payload[head:].copy_(bitpack.pack_trits(trits.view(-1)[: v.numel()]))
    if carry is not None:
        ternary_decode(payload[None], v, block, add=True, scale=-1.0)
        _left(v, carry)


def ternary_decode(payloads: Tensor, out: Tensor, block: int, *, add: bool, scale: float) -> None:
    """(trit − 1)·absmax of the block."""
    n = out.numel()
    head = 4 * -(-n // block)
    for p, payload in enumerate(payloads):
        signs = blocks(bitpack.unpack_trits(payload[head:], n).float() - 1, block)
        values = signs * payload[:head].view(torch.float32)[:, None]
        store(values.view(-1)[:n], out, add=add or p > 0, scale=scale)


# -- powers of two ------------------------------------------------------------------------------


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two ≤ x ≥ 0, exactly; 0 for 0, NaN for a non-finite x."""
    mantissa, _ = torch.frexp(x)
    return torch.where(x == 0, x, x / (2 * mantissa))


def natural_encode(x: Tensor, payload: Tensor, seed: int, carry: Carry | None = None) -> None:
    """Scale = the largest power of two ≤ absmax; byte = sign·128 + c, where c > 0 stands for scale·2^(c−126)."""
    if not x.numel():
        return
    v = _joined(x, carry)
    units, _, power = _normal(v[None], v.abs().amax()[None])
    scale, y = torch.where(v.any(), power, 0.0), units[0].abs()
    mantissa, exponent = torch.frexp(y)
    below = y < 2.0**-125  # smaller than code 1: rounded at random to it or to zero
    chance_up = torch.where(below, y * 2.0**125, 2 * mantissa - 1)
    code = torch.where(below, 0, exponent + 125) + (uniform(y, seed) < chance_up)
    payload[:4].view(torch.float32).copy_(scale)
    payload[4:].copy_(code + 128 * (v < 0))
    if carry is not None:
        natural_decode(payload[None], v, add=True, scale=-1.0)
        _left(v, carry)


def natural_decode(payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
    """±scale·2^(c−126), and zero for c = 0."""
    if not out.numel():
        return
    for p, payload in enumerate(payloads):
        code = payload[4:].to(torch.int32)
        c = code & 127
        magnitude = ((c + 1) << 23).view(torch.float32)  # the bits of 2^(c−126)
        signed = torch.where(code > 127, -magnitude, magnitude)
        values = torch.where(c > 0, signed, 0.0) * payload[:4].view(torch.float32)
        store(values, out, add=add or p > 0, scale=scale)
