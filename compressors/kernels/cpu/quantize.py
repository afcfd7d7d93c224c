"""Loops of the codecs that send a whole level of a block's scale for each value.

Arguments named alike mean the same everywhere. ``v`` is x itself, or (``carried``) takes x + old and in the end what
was not sent of it. Payloads to decode have a first dimension of ranks, in whose order they are added.

Inner loops run over slices from 0 on: numba counts an index that might be negative from the end, and LLVM makes no
vectors of that.
"""

from __future__ import annotations

import numpy as np

from commlib.compressors.kernels.cpu import simd
from commlib.compressors.kernels.cpu.bitpack import pack, pack_trits, unpack, unpack_trits
from commlib.compressors.kernels.cpu.jit import Bytes, Floats, Scalar, Words, jit
from commlib.compressors.kernels.cpu.onebit import BLOCK, HALF, ZERO, add, folded, halved

ONE, NAN, INFINITY = np.float32(1), np.float32(np.nan), np.float32(np.inf)
MAGIC = np.float32(3 << 22)  # added and taken away again it rounds to the nearest, half to even, below 2²²
MAGNITUDE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
UNIT = np.float32(2.0**-24)
CHUNK = 8 * 5 * 64  # values at a time: whole bytes of fields of any width, and of trits


@jit
def hash32(i: int, low: np.uint32, high: np.uint32) -> Scalar:
    """The i-th of the numbers of ``random.hash32`` with this key."""
    x = np.uint32(np.uint32(i) + low)
    x = np.uint32(np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x45D9F3B)) ^ high)
    x = np.uint32(np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)) ^ high)
    x = np.uint32(np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x45D9F3B)) ^ high)
    return np.uint32(x ^ (x >> np.uint32(16)))


@jit
def uniform(i: int, low: np.uint32, high: np.uint32) -> Scalar:
    """The i-th of the numbers that ``random.uniform`` draws with this key."""
    return np.float32(np.int32(hash32(i, low, high) >> np.uint32(8))) * UNIT


@jit
def absmax_of(v: Floats) -> Scalar:
    """The largest |v|; infinity is larger than what is finite, and NaN than infinity."""
    found, whole = np.int32(0), len(v) // simd.WIDTH * simd.WIDTH
    for i in range(0, whole, simd.WIDTH):
        found = max(found, simd.largest(v, i))
    for i in range(whole, len(v)):
        found = max(found, np.int32(simd.as_bits(v[i]) & MAGNITUDE))
    return simd.as_float(found)


@jit
def joined_absmax(x: Floats, old: Floats, v: Floats, carried: bool) -> Scalar:
    """The largest |v|, of a block that may be larger than a cache."""
    found = np.int32(0)
    for first in range(0, len(v), BLOCK):
        part = v[first : first + BLOCK]
        if carried:
            add(x[first : first + BLOCK], old[first : first + BLOCK], part)
        found = max(found, simd.as_bits(absmax_of(part)))
    return simd.as_float(found)


@jit
def normal(absmax: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """(up, down, power): v·up·down is v over the largest power of two ≤ absmax, exactly. For a finite absmax."""
    if absmax == ZERO:
        return np.float32(2.0**64), ZERO, np.float32(2.0**-64)
    up = np.float32(2.0**64) if absmax < np.float32(2.0**-64) else ONE
    power = simd.as_float(np.int32(simd.as_bits(absmax * up) & INFINITE))
    return up, ONE / power, power / up


@jit
def _nothing(v: Floats, carried: bool, codes: Words, code: int) -> None:
    """Codes of a block that has a value that is not finite: its scale says so."""
    codes[: len(v)] = code
    if carried:
        v[:] = NAN


@jit
def _nearest(
    v: Floats, up: Scalar, down: Scalar, times: Scalar, levels: int, absmax: Scalar, carried: bool, codes: Words
) -> None:
    inverse, middle = ONE / np.float32(levels), np.int32(levels)
    if carried:
        for i in range(len(v)):
            level = (v[i] * up * down * times + MAGIC) - MAGIC
            codes[i] = np.int32(level) + middle
            v[i] -= level * inverse * absmax
    else:
        for i in range(len(v)):
            codes[i] = np.int32((v[i] * up * down * times + MAGIC) - MAGIC) + middle


@jit
def linear_encode(
    x: Floats, old: Floats, v: Floats, carried: bool, scales: Floats, fields: Bytes, block: int, levels: int, width: int
) -> None:
    """Same as the reference's ``linear_encode``."""
    n, span = len(v), max(block, CHUNK // block * block)  # blocks at a time: cutting arrays takes time, too
    codes = np.empty(min(n, span), np.int32)
    for first in range(0, n, span):
        last = min(n, first + span)
        if carried:
            add(x[first:last], old[first:last], v[first:last])
        for b in range(first // block, (last + block - 1) // block):
            start, end = b * block, min(n, (b + 1) * block)
            part, there = v[start:end], codes[start - first : end - first]
            scales[b] = absmax = absmax_of(part)
            if absmax < INFINITY:
                up, down, _ = normal(absmax)
                times = np.float32(levels) / np.float32(max(ONE, absmax * up * down))
                _nearest(part, up, down, times, levels, absmax, carried, there)
            else:
                _nothing(part, carried, there, levels)
        pack(codes, last - first, first, width, fields)


@jit
def _at_random(
    v: Floats, first: int, up: Scalar, down: Scalar, times: Scalar, levels: int, scale: Scalar, carried: bool,
    codes: Words, low: np.uint32, high: np.uint32,
) -> None:  # fmt: skip
    top, inverse, middle = np.float32(levels), ONE / np.float32(levels), np.int32(levels)
    for i in range(len(v)):
        unit = v[i] * up * down
        y = abs(unit) * times
        y = y if y < top else top
        floor = np.float32(np.int32(y))
        level = floor + (ONE if uniform(first + i, low, high) < y - floor else ZERO)
        level = -level if unit < ZERO else level
        codes[i] = np.int32(level) + middle
        if carried:
            v[i] -= level * inverse * scale


@jit
def norm_encode(
    x: Floats, old: Floats, v: Floats, carried: bool, scales: Floats, fields: Bytes, block: int, levels: int,
    width: int, low: np.uint32, high: np.uint32,
) -> None:  # fmt: skip
    """Same as the reference's ``norm_encode``."""
    n, span = len(v), max(block, CHUNK // block * block)
    codes, half = np.empty(min(n, span), np.int32), np.empty(HALF, np.float32)
    sums = np.empty((min(n, block) + BLOCK - 1) // BLOCK, np.float32)
    for first in range(0, n, span):
        last = min(n, first + span)
        if carried:
            add(x[first:last], old[first:last], v[first:last])
        for b in range(first // block, (last + block - 1) // block):
            start, end = b * block, min(n, (b + 1) * block)
            part, there = v[start:end], codes[start - first : end - first]
            absmax = absmax_of(part)
            if absmax < INFINITY:
                up, down, power = normal(absmax)
                length = _length(part, up, down, sums, half)
                scales[b] = scale = length * power
                times = np.float32(levels) / np.float32(max(length, ONE))
                _at_random(part, start, up, down, times, levels, scale, carried, there, low, high)
            else:
                scales[b] = NAN
                _nothing(part, carried, there, levels)
        pack(codes, last - first, first, width, fields)


@jit
def _length(v: Floats, up: Scalar, down: Scalar, sums: Floats, half: Floats) -> Scalar:
    """The Euclidean norm of v·up·down."""
    blocks = (len(v) + BLOCK - 1) // BLOCK
    for b in range(blocks):
        part = v[b * BLOCK : min(len(v), (b + 1) * BLOCK)]
        _squares(part, up, down, half)
        sums[b] = halved(half, HALF)
    return np.sqrt(folded(sums, blocks, half))


@jit
def _squares(v: Floats, up: Scalar, down: Scalar, half: Floats) -> None:
    """Squares of up to 1024 values, once halved."""
    for i in range(min(HALF, len(v))):
        y = v[i] * up * down
        half[i] = y * y
    half[len(v) :] = ZERO
    if len(v) > HALF:
        rest = v[HALF:]
        for i in range(len(rest)):
            z = rest[i] * up * down
            half[i] += z * z


@jit
def levels_decode(
    scales: Floats, fields: Bytes, out: Floats, block: int, levels: int, width: int, more: bool, scale: Scalar
) -> None:
    """The sum over ranks; scales, shape (P, blocks), fields, shape (P, bytes)."""
    n, factor, codes = len(out), np.float32(scale), np.empty(CHUNK, np.int32)
    for first in range(0, n, CHUNK):
        last = min(n, first + CHUNK)
        for p in range(len(scales)):
            unpack(fields[p], first, last - first, width, codes)
            for b in range(first // block, (last + block - 1) // block):
                start, end = max(first, b * block), min(last, (b + 1) * block)
                part = codes[start - first : end - first]
                _valued(part, levels, scales[p, b], factor, out[start:end], more or p > 0)


@jit
def _valued(codes: Words, levels: int, size: Scalar, factor: Scalar, out: Floats, more: bool) -> None:
    inverse, middle = ONE / np.float32(levels), np.int32(levels)
    if more:
        for i in range(len(codes)):
            out[i] += np.float32(codes[i] - middle) * inverse * size * factor
    else:
        for i in range(len(codes)):
            out[i] = np.float32(codes[i] - middle) * inverse * size * factor


@jit
def _signs_at_random(
    v: Floats, first: int, up: Scalar, down: Scalar, absmax: Scalar, carried: bool, codes: Words,
    low: np.uint32, high: np.uint32,
) -> None:  # fmt: skip
    bound = absmax * up * down
    for i in range(len(v)):
        y = v[i]
        sign = ONE if y > ZERO else (-ONE if y < ZERO else ZERO)
        trit = sign if uniform(first + i, low, high) * bound < abs(y) * up * down else ZERO
        codes[i] = np.int32(trit) + np.int32(1)
        if carried:
            v[i] = y - trit * absmax


@jit
def ternary_encode(
    x: Floats, old: Floats, v: Floats, carried: bool, scales: Floats, trits: Bytes, block: int,
    low: np.uint32, high: np.uint32,
) -> None:  # fmt: skip
    """Same as the reference's ``ternary_encode``."""
    n, codes = len(v), np.empty(CHUNK, np.int32)
    for b in range((n + block - 1) // block):
        start, end = b * block, min(n, (b + 1) * block)
        scales[b] = joined_absmax(x[start:end], old[start:end], v[start:end], carried)
    for first in range(0, n, CHUNK):
        last = min(n, first + CHUNK)
        for b in range(first // block, (last + block - 1) // block):
            absmax, start, end = scales[b], max(first, b * block), min(last, (b + 1) * block)
            part, there = v[start:end], codes[start - first : end - first]
            if absmax < INFINITY:
                up, down, _ = normal(absmax)
                _signs_at_random(part, start, up, down, absmax, carried, there, low, high)
            else:
                _nothing(part, carried, there, 1)
        pack_trits(codes, last - first, first, trits)


@jit
def ternary_decode(scales: Floats, trits: Bytes, out: Floats, block: int, more: bool, scale: Scalar) -> None:
    """The sum over ranks; scales, shape (P, blocks), trits, shape (P, bytes)."""
    n, factor, codes = len(out), np.float32(scale), np.empty(CHUNK, np.int32)
    for first in range(0, n, CHUNK):
        last = min(n, first + CHUNK)
        for p in range(len(scales)):
            unpack_trits(trits[p], first, last - first, codes)
            for b in range(first // block, (last + block - 1) // block):
                start, end = max(first, b * block), min(last, (b + 1) * block)
                part = codes[start - first : end - first]
                _valued(part, 1, scales[p, b], factor, out[start:end], more or p > 0)
