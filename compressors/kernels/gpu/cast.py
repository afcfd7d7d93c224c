"""Kernels of the codecs that shorten each value's format: to float16, bfloat16 or a power of two.

Arguments as in ``gpu_signs``.
"""

from __future__ import annotations

import triton.language as tl

from commlib.compressors.kernels.gpu.jit import jit
from commlib.compressors.kernels.gpu.tiles import as_bits, as_float, floats, joined, leave, normal, uniform, units

FRACTION = tl.constexpr(0x7FFFFF)
TINY, HUGE = tl.constexpr(2.0**-125), tl.constexpr(2.0**125)
OF_FRACTION = tl.constexpr(2.0**-23)


@jit
def _indices(WIDTH: tl.constexpr) -> tl.tensor:
    return tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)


@jit
def _shortened(v: tl.tensor, BRAIN: tl.constexpr) -> tl.tensor:
    """The bits of the nearest value, half to even: of bfloat16 (BRAIN), or float16.

    Those of bfloat16 are the upper half of float32's, rounded as whole numbers: Triton's interpreter cuts them off.
    """
    if BRAIN:
        word = v.to(tl.uint32, bitcast=True)
        word = tl.where(v == v, word + 0x7FFF + ((word >> 16) & 1), 0x7FC00000)
        short = (word >> 16).to(tl.uint16)
    else:
        short = v.to(tl.float16).to(tl.uint16, bitcast=True)
    return short


@jit
def _widened(short: tl.tensor, BRAIN: tl.constexpr) -> tl.tensor:
    """Inverse of the shortening of a float32 to 16 bits."""
    if BRAIN:
        wide = (short.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = short.to(tl.float16, bitcast=True).to(tl.float32)
    return wide


@jit
def cast_encode(
    x: tl.tensor, old: tl.tensor, new: tl.tensor, bar: tl.tensor, payload: tl.tensor, n: tl.tensor,
    CARRIED: tl.constexpr, BRAIN: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Cast to bfloat16 (BRAIN) or float16."""
    i = _indices(WIDTH)
    there = i < n
    v = joined(x, old, i, there, CARRIED)
    short = _shortened(v, BRAIN)
    tl.store(payload.to(tl.pointer_type(tl.uint16)) + i, short, mask=there)
    if CARRIED:
        leave(new, i, v - _widened(short, BRAIN), bar, there)


@jit
def _sent(
    payload: tl.tensor, i: tl.tensor, there: tl.tensor, scale: tl.tensor, BRAIN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Values of one payload, times the scale."""
    return _widened(tl.load(payload.to(tl.pointer_type(tl.uint16)) + i, mask=there, other=0), BRAIN) * scale


@jit
def cast_decode(
    payloads: tl.tensor, stride: tl.tensor, ranks: tl.tensor, out: tl.tensor, n: tl.tensor, scale: tl.tensor,
    ADD: tl.constexpr, BRAIN: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """The sum over ranks, in their order."""
    i = _indices(WIDTH)
    there = i < n
    total = _sent(payloads, i, there, scale, BRAIN)
    if ADD:
        total = tl.load(out + i, mask=there, other=0.0) + total
    for _ in range(1, ranks):
        payloads += stride
        total += _sent(payloads, i, there, scale, BRAIN)
    tl.store(out + i, total, mask=there)


@jit
def _power(code: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """Power of two that a byte stands for."""
    c = code & 127
    size = as_float(((c + 1) << 23) | ((code >> 7) << 31))
    return tl.where(c > 0, size, 0.0) * largest


@jit
def natural_encode(
    x: tl.tensor, old: tl.tensor, new: tl.tensor, bar: tl.tensor, payload: tl.tensor, n: tl.tensor, low: tl.tensor,
    high: tl.tensor, maximum: tl.tensor, CARRIED: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Powers of two at random, below the largest of all, the bits of whose ``maximum`` are known."""
    i = _indices(WIDTH)
    there = i < n
    v = joined(x, old, i, there, CARRIED)
    absmax = as_float(tl.load(maximum))
    up, down, power = normal(absmax)
    largest = tl.where(absmax == 0.0, 0.0, power)
    tl.store(floats(payload), largest, mask=tl.program_id(0) == 0)
    y = tl.abs(units(v, up, down))
    below = y < TINY  # smaller than code 1: rounded at random to it or to zero
    share = tl.where(below, y * HUGE, (as_bits(y) & FRACTION).to(tl.float32) * OF_FRACTION)
    code = tl.where(below, 0, (as_bits(y) >> 23) - 1) + (uniform(i, low, high) < share).to(tl.int32)
    code = code | tl.where(v < 0.0, 128, 0)
    tl.store(payload + 4 + i, code.to(tl.uint8), mask=there)
    if CARRIED:
        leave(new, i, v - _power(code, largest), bar, there)


@jit
def natural_decode(
    payloads: tl.tensor, stride: tl.tensor, ranks: tl.tensor, out: tl.tensor, n: tl.tensor, scale: tl.tensor,
    ADD: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """The sum over ranks, in their order."""
    i = _indices(WIDTH)
    there = i < n
    code = tl.load(payloads + 4 + i, mask=there, other=0).to(tl.int32)
    total = _power(code, tl.load(floats(payloads))) * scale
    if ADD:
        total = tl.load(out + i, mask=there, other=0.0) + total
    for _ in range(1, ranks):
        payloads += stride
        code = tl.load(payloads + 4 + i, mask=there, other=0).to(tl.int32)
        total += _power(code, tl.load(floats(payloads))) * scale
    tl.store(out + i, total, mask=there)
