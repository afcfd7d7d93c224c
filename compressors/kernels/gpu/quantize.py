"""Kernels of the codecs that send a whole level of a block's scale for each value. Arguments as in ``gpu_signs``.

A block that has a value which is not finite has no units, its scale says so, and so does what it leaves in ``new``.
"""

from __future__ import annotations

import triton.language as tl

from commlib.compressors.kernels.gpu.jit import jit
from commlib.compressors.kernels.gpu.tiles import (
    MAGNITUDE,
    as_bits,
    as_float,
    floats,
    halved,
    joined,
    leave,
    normal,
    pack,
    tile,
    uniform,
    units,
    unpack,
)

MAGIC = tl.constexpr(float(3 << 22))  # added and taken away again it rounds to the nearest, half to even, below 2²²


@jit
def _begin(
    payload: tl.tensor, i: tl.tensor, row: tl.tensor, block: tl.tensor, there: tl.tensor, scale: tl.tensor,
) -> None:  # fmt: skip
    """Write a block's scale where its first value is."""
    every = tl.zeros_like(i)
    tl.store(floats(payload) + row + every, scale + every, mask=there & (i == row * block))


@jit
def levels_encode(
    x: tl.tensor, old: tl.tensor, new: tl.tensor, bar: tl.tensor, payload: tl.tensor, head: tl.tensor,
    nbytes: tl.tensor, n: tl.tensor, block: tl.tensor, chunks: tl.tensor, blocks: tl.tensor, top: tl.tensor,
    inverse: tl.tensor, low: tl.tensor, high: tl.tensor, maxima: tl.tensor, squares: tl.tensor, CARRIED: tl.constexpr,
    NORM: tl.constexpr, KNOWN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FLAT: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr,
) -> None:  # fmt: skip
    """The nearest levels of blocks' absmax, or (NORM) levels of their norm at random.

    Blocks fit into a program, or the bits of their ``maxima`` and the sums of ``squares`` of their units are KNOWN.
    """
    first, last, row = tile(n, block, chunks, ROWS, WIDTH, FLAT)
    i = first + tl.arange(0, WIDTH)[None, :]
    there = i < last
    v = joined(x, old, i, there, CARRIED)
    if KNOWN:
        absmax = as_float(tl.load(maxima + row, mask=row < blocks, other=0))
    else:
        absmax = as_float(tl.max(as_bits(v) & MAGNITUDE, axis=1)[:, None])
    up, down, power = normal(absmax)
    y = units(v, up, down)
    if NORM:
        square = tl.load(squares + row, mask=row < blocks, other=0.0) if KNOWN else halved(y * y, ROWS, WIDTH)[:, None]
        length = tl.sqrt_rn(square)
        scale = length * power
        share = tl.minimum(tl.abs(y) * tl.div_rn(top, tl.maximum(length, 1.0)), top)
        down_to = tl.floor(share)
        size = down_to + (uniform(i, low, high) < share - down_to).to(tl.float32)
        level = tl.where(y < 0.0, -size, size)
    else:
        scale = absmax
        largest = tl.where(down > 0.0, absmax * up * down, 0.0)
        level = (y * tl.div_rn(top, tl.maximum(largest, 1.0)) + MAGIC) - MAGIC
    _begin(payload, i, row, block, there, scale)
    codes = tl.where(there, (level + top).to(tl.int32), 0)
    pack(codes, payload + head, first, last, nbytes, ROWS, WIDTH, BITS, GROUP, BYTES)
    if CARRIED:
        leave(new, i, v - level * inverse * scale, bar, there)


@jit
def _level(
    payload: tl.tensor, head: tl.tensor, nbytes: tl.tensor, row: tl.tensor, i: tl.tensor, there: tl.tensor,
    n: tl.tensor, block: tl.tensor, middle: tl.tensor, inverse: tl.tensor, scale: tl.tensor, BITS: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Values of one payload, times the scale; of trits if BITS is 0."""
    if BITS == 0:
        code = tl.load(payload + head + i // 5, mask=there, other=0).to(tl.int32)
        digit = (i % 5).to(tl.int32)
        code = tl.where(digit == 1, code // 3, tl.where(digit == 2, code // 9, code))
        code = tl.where(digit == 3, code // 27, tl.where(digit == 4, code // 81, code)) % 3
    else:
        code = unpack(payload + head, i, there, nbytes, BITS, SPAN)
    size = tl.load(floats(payload) + row, mask=row * block < n, other=0.0)
    return (code - middle).to(tl.float32) * inverse * size * scale


@jit
def decode(
    payloads: tl.tensor, stride: tl.tensor, ranks: tl.tensor, head: tl.tensor, nbytes: tl.tensor, out: tl.tensor,
    n: tl.tensor, block: tl.tensor, chunks: tl.tensor, middle: tl.tensor, inverse: tl.tensor, scale: tl.tensor,
    ADD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FLAT: tl.constexpr, BITS: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:  # fmt: skip
    """The sum over ranks, in their order."""
    first, last, row = tile(n, block, chunks, ROWS, WIDTH, FLAT)
    i = first + tl.arange(0, WIDTH)[None, :]
    there = i < last
    total = _level(payloads, head, nbytes, row, i, there, n, block, middle, inverse, scale, BITS, SPAN)
    if ADD:
        total = tl.load(out + i, mask=there, other=0.0) + total
    for _ in range(1, ranks):
        payloads += stride
        total += _level(payloads, head, nbytes, row, i, there, n, block, middle, inverse, scale, BITS, SPAN)
    tl.store(out + i, total, mask=there)


@jit
def trits_encode(
    x: tl.tensor, old: tl.tensor, new: tl.tensor, bar: tl.tensor, payload: tl.tensor, head: tl.tensor,
    nbytes: tl.tensor, n: tl.tensor, block: tl.tensor, low: tl.tensor, high: tl.tensor, maxima: tl.tensor,
    CARRIED: tl.constexpr, BYTES: tl.constexpr,
) -> None:  # fmt: skip
    """−absmax, 0 or absmax at random, of blocks whose ``maxima`` are known; five values to a byte."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)[:, None]
    digit = tl.arange(0, 8)[None, :]
    i = byte * 5 + digit
    there = (digit < 5) & (i < n)
    row = i // block
    absmax = as_float(tl.load(maxima + row, mask=there, other=0))
    v = joined(x, old, i, there, CARRIED)
    up, down, _ = normal(absmax)
    y = units(v, up, down)
    largest = tl.where(down > 0.0, absmax * up * down, 0.0)
    sent = (uniform(i, low, high) * largest < tl.abs(y)).to(tl.int32)
    sign = tl.where(y < 0.0, -sent, sent)
    _begin(payload, i, row, block, there, absmax)
    weight = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
    packed = tl.sum(tl.where(there, (sign + 1) * weight, 0), axis=1)[:, None]
    tl.store(payload + head + byte, packed.to(tl.uint8), mask=byte < nbytes)
    if CARRIED:
        leave(new, i, v - sign.to(tl.float32) * absmax, bar, there)
