"""Loops of the codecs of one bit a value, and the order in which values are summed."""

from __future__ import annotations

import numpy as np

from commlib.compressors.kernels.cpu import onebit_simd, simd
from commlib.compressors.kernels.cpu.jit import Bytes, Doubles, Floats, Scalar, jit

# 1024 values are halved, the first half plus the second, until one is left, and the sums likewise: as `sums.fold`
# does with whole tensors. IEEE additions in a fixed order have one result.
BLOCK, HALF = onebit_simd.BLOCK, onebit_simd.BLOCK // 2
CHUNK = 4096  # values that stay in the first cache while several ranks' payloads are added to them
HELD = 16384  # values of a column that stay in the second cache until its means are known
PAST = 1 << 18  # a tensor of more values than this is out of the caches when it is read again
ZERO = np.float32(0)


@jit
def halved(half: Floats | Doubles, width: int) -> Scalar:
    """The sum of the first ``width`` values, a power of two; they are overwritten."""
    while width > 1:
        width //= 2
        for i in range(width):
            half[i] += half[i + width]
    return half[0]


@jit
def enough(n: int) -> Scalar:
    """Half of 1024 values, or a smaller power of two, if all that follow the first n ≥ 1 in it are zeros."""
    width = HALF
    while width > 1 and width >= n:
        width //= 2
    return width


@jit
def folded(a: Floats | Doubles, n: int, half: Floats | Doubles) -> Scalar:
    """The sum of ``a[:n]``, n ≥ 1, which is overwritten."""
    while n > 1:
        blocks = (n + BLOCK - 1) // BLOCK
        for b in range(blocks):
            a[b] = _folded_block(a[b * BLOCK : min(n, (b + 1) * BLOCK)], half)
        n = blocks
    return a[0] + ZERO


@jit
def _folded_block(part: Floats | Doubles, half: Floats | Doubles) -> Scalar:
    """The sum of 1 to 1024 values, as if zeros followed: to add several of them is to add one."""
    width = enough(len(part))
    for i in range(width):
        low = part[i] if i < len(part) else ZERO
        high = part[i + width] if i + width < len(part) else ZERO
        half[i] = (low + ZERO) + (high + ZERO)  # of -0 and 0 the sum is 0
    return halved(half, width)


@jit
def add(x: Floats, old: Floats, v: Floats) -> None:
    """v = x + old. (LLVM would take a loop for one over overlapping arrays where ``old`` is ``v``.)"""
    whole = len(v) // simd.WIDTH * simd.WIDTH
    for i in range(0, whole, simd.WIDTH):
        simd.join(x, old, v, i)
    for i in range(whole, len(v)):
        v[i] = x[i] + old[i]


@jit
def _sides(v: Floats, up: Floats, low: Floats) -> None:
    """The values ≥ 0, and the others, of up to 1024, once halved."""
    if len(v) == BLOCK:
        for i in range(HALF):
            y, z = v[i], v[i + HALF]
            up[i] = (y if y >= ZERO else ZERO) + (z if z >= ZERO else ZERO)
            low[i] = (ZERO if y >= ZERO else y) + (ZERO if z >= ZERO else z)
    else:
        for i in range(HALF):
            y = v[i] if i < len(v) else ZERO
            z = v[i + HALF] if i + HALF < len(v) else ZERO
            up[i] = (y if y >= ZERO else ZERO) + (z if z >= ZERO else ZERO)
            low[i] = (ZERO if y >= ZERO else y) + (ZERO if z >= ZERO else z)


@jit
def _sizes(v: Floats, half: Floats) -> None:
    """Magnitudes of up to 1024 values, once halved."""
    if len(v) == BLOCK:
        for i in range(HALF):
            half[i] = abs(v[i]) + abs(v[i + HALF])
    else:
        for i in range(HALF):
            half[i] = (abs(v[i]) if i < len(v) else ZERO) + (abs(v[i + HALF]) if i + HALF < len(v) else ZERO)


@jit
def _pack(v: Floats, shift: int, start: int, end: int, bits: Bytes) -> Scalar:
    """Bit i of ``bits`` is v[i - shift] ≥ 0, for a part; how many are set. A byte is begun by the first of its values.

    ``v`` may be a column that begins at ``shift``.
    """
    ones: Scalar = 0
    i = start
    while i < end:
        if i % 8 == 0 and i + 64 <= end:
            word = simd.at_least(v, i - shift, ZERO)
            eight = bits[i // 8 : i // 8 + 8]
            for k in range(8):
                eight[k] = np.uint8(word >> np.uint64(8 * k))
            ones += np.int64(simd.popcount(word))
            i += 64
        else:
            if i % 8 == 0:
                bits[i // 8] = 0
            if v[i - shift] >= ZERO:
                bits[i // 8] |= np.uint8(1 << (i % 8))
                ones += 1
            i += 1
    return ones


@jit
def two_means_encode(
    x: Floats, old: Floats, v: Floats, carried: bool, means: Floats, bits: Bytes, column: int, past: bool
) -> None:
    """As the reference's; ``v`` is x itself, or (``carried``) what was not sent of x + old, ``past`` the caches."""
    n = len(v)
    held = np.empty(min(HELD, column, n) if carried else 0, np.float32)
    up, low, sums = np.empty(HALF, np.float32), np.empty(HALF, np.float32), np.empty(2, np.float32)
    most = (min(n, column) + BLOCK - 1) // BLOCK
    ups, lows = np.empty(most, np.float32), np.empty(most, np.float32)
    for c in range((n + column - 1) // column):
        start, end = c * column, min(n, (c + 1) * column)
        whole = held[: end - start] if end - start <= len(held) else v[start:end]
        ones, blocks = 0, (end - start + BLOCK - 1) // BLOCK
        for b in range(blocks):
            first, last = start + b * BLOCK, min(end, start + (b + 1) * BLOCK)
            part = whole[first - start : last - start]
            if len(part) == BLOCK and first % 8 == 0:
                packed = bits[first // 8 : first // 8 + BLOCK // 8]
                if carried:
                    ones += onebit_simd.sides_joined(x[first:last], old[first:last], part, packed, sums)
                else:
                    ones += onebit_simd.sides(part, part, part, packed, sums)
                ups[b], lows[b] = sums[0], sums[1]
                continue
            if carried:
                add(x[first:last], old[first:last], part)
            _sides(part, up, low)
            ups[b], lows[b] = halved(up, HALF), halved(low, HALF)
            ones += _pack(whole, start, first, last, bits)
        mean_low = folded(lows, blocks, low) / np.float32(max(1, end - start - ones))
        mean_up = folded(ups, blocks, up) / np.float32(max(1, ones))
        means[2 * c], means[2 * c + 1] = mean_low, mean_up
        if past:
            take_past(whole, mean_low, mean_up, v[start:end], x[start:], old[start:])
        elif carried:
            take(whole, mean_low, mean_up, v[start:end])
    if past:
        simd.fence()


@jit
def take(v: Floats, low: Scalar, up: Scalar, rest: Floats) -> None:
    """Rest of values when the mean of their side is sent; ``rest`` may be ``v``."""
    whole = len(v) // simd.WIDTH * simd.WIDTH
    for i in range(0, whole, simd.WIDTH):
        onebit_simd.less(v, low, up, rest, i)
    for i in range(whole, len(v)):
        rest[i] = v[i] - (up if v[i] >= ZERO else low)


@jit
def take_past(v: Floats, low: Scalar, up: Scalar, rest: Floats, x: Floats, old: Floats) -> None:
    """As :func:`take`, past the caches. ``x`` and ``old``, from where ``v`` was made of them, have the next column.

    It comes meanwhile: its second half is asked for here, for the first one was where ``v`` was made.
    """
    whole = len(v) // simd.WIDTH * simd.WIDTH
    far = len(v) + len(v) // 2
    for i in range(0, whole, 2 * simd.WIDTH):
        onebit_simd.ask(x, far + i // 2)
        onebit_simd.less_past(v, low, up, rest, i)
        if i + simd.WIDTH < whole:
            onebit_simd.ask(old, far + i // 2)
            onebit_simd.less_past(v, low, up, rest, i + simd.WIDTH)
    for i in range(whole, len(v)):
        rest[i] = v[i] - (up if v[i] >= ZERO else low)


@jit
def _spread(bits: Bytes, start: int, end: int, low: Scalar, up: Scalar, out: Floats, more: bool, past: bool) -> None:
    """``up`` where the bit is set, else ``low``: written (``past`` the caches) or (``more``) added to a part."""
    i = start
    while i < end:
        if i % 8 == 0 and i + 64 <= end:
            word, eight = np.uint64(0), bits[i // 8 : i // 8 + 8]
            for k in range(8):
                word |= np.uint64(eight[k]) << np.uint64(8 * k)
            if more:
                simd.add(word, low, up, out, i)
            elif past and i % 16 == 0:
                simd.put_past(word, low, up, out, i)
            else:
                simd.put(word, low, up, out, i)
            i += 64
        else:
            value = up if (bits[i // 8] >> (i % 8)) & 1 else low
            out[i] = out[i] + value if more else value
            i += 1


@jit
def two_means_decode(
    means: Floats, bits: Bytes, out: Floats, column: int, more: bool, scale: Scalar, past: bool
) -> None:
    """The sum over ranks; means, shape (P, 2·columns), bits, shape (P, bytes)."""
    n, factor, past = len(out), np.float32(scale), past and len(means) == 1
    for c in range((n + column - 1) // column):
        end = min(n, (c + 1) * column)
        for first in range(c * column, end, CHUNK):
            last = min(end, first + CHUNK)
            for p in range(len(means)):
                low, up = means[p, 2 * c] * factor, means[p, 2 * c + 1] * factor
                _spread(bits[p], first, last, low, up, out, more or p > 0, past)
    if past:
        simd.fence()


@jit
def sign_encode(x: Floats, old: Floats, v: Floats, carried: bool, mean: Floats, bits: Bytes) -> None:
    """As the reference's; arguments as for :func:`two_means_encode`."""
    n = len(v)
    half, blocks = np.empty(HALF, np.float32), (n + BLOCK - 1) // BLOCK
    sums = np.empty(blocks, np.float32)
    for b in range(blocks):
        first, last = b * BLOCK, min(n, (b + 1) * BLOCK)
        if carried:
            add(x[first:last], old[first:last], v[first:last])
        _sizes(v[first:last], half)
        sums[b] = halved(half, HALF)
        _pack(v, 0, first, last, bits)
    size = folded(sums, blocks, half) / np.float32(n)
    mean[0] = size
    if carried:
        take(v, -size, size, v)


@jit
def sign_decode(mean: Floats, bits: Bytes, out: Floats, more: bool, scale: Scalar, past: bool) -> None:
    """The sum over ranks; mean, shape (P, 1), bits, shape (P, bytes)."""
    n, factor, past = len(out), np.float32(scale), past and len(mean) == 1
    for first in range(0, n, CHUNK):
        for p in range(len(mean)):
            size = mean[p, 0] * factor
            _spread(bits[p], first, min(n, first + CHUNK), -size, size, out, more or p > 0, past)
    if past:
        simd.fence()
