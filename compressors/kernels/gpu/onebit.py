"""Kernels of the codecs of one bit a value.

Arguments named alike mean the same in all files of kernels: ``old`` and ``new`` are of a carry (x itself, and neither
read nor written, where there is none), ``head`` is where a payload's packed numbers begin, ``nbytes`` how many bytes
these are.
"""

from __future__ import annotations

import triton.language as tl

from commlib.compressors.kernels.gpu.jit import jit
from commlib.compressors.kernels.gpu.tiles import floats, halved, joined, pack, tile, unpack


@jit
def _whole(v: tl.tensor, COLUMNS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Sums of columns in PARTS rows each."""
    parts = tl.reshape(halved(v, COLUMNS * PARTS, WIDTH), (COLUMNS, PARTS))
    return halved(parts, COLUMNS, PARTS)


@jit
def _rows(x: tl.tensor, COLUMNS: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """A number of each column for each of its rows, shape (COLUMNS,) → (COLUMNS·PARTS, 1)."""
    return tl.reshape(tl.broadcast_to(x[:, None], (COLUMNS, PARTS)), (COLUMNS * PARTS, 1))


@jit
def columns_encode(
    x: tl.tensor, old: tl.tensor, new: tl.tensor, payload: tl.tensor, head: tl.tensor, nbytes: tl.tensor, n: tl.tensor,
    column: tl.tensor, CARRIED: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Two means, and all else, of columns that fit into a program: PARTS rows of WIDTH values each."""
    begin = tl.program_id(0).to(tl.int64) * COLUMNS
    r = tl.arange(0, COLUMNS * PARTS)[:, None]
    of = begin + r // PARTS
    first, last = of * column + r % PARTS * WIDTH, tl.minimum(of * column + column, n)
    i = first + tl.arange(0, WIDTH)[None, :]
    there = i < last
    v = joined(x, old, i, there, CARRIED)
    upper = (v >= 0.0) & there
    ones = tl.sum(tl.reshape(tl.sum(upper.to(tl.int32), axis=1), (COLUMNS, PARTS)), axis=1)
    c = begin + tl.arange(0, COLUMNS)
    there_are = (tl.minimum(c * column + column, n) - c * column).to(tl.int32)
    sum_low = _whole(tl.where(upper, 0.0, v), COLUMNS, PARTS, WIDTH)
    sum_up = _whole(tl.where(upper, v, 0.0), COLUMNS, PARTS, WIDTH)
    low = tl.div_rn(sum_low, tl.maximum(there_are - ones, 1).to(tl.float32))
    up = tl.div_rn(sum_up, tl.maximum(ones, 1).to(tl.float32))
    tl.store(floats(payload) + 2 * c, low, mask=c * column < n)
    tl.store(floats(payload) + 2 * c + 1, up, mask=c * column < n)
    pack(upper.to(tl.int32), payload + head, first, last, nbytes, COLUMNS * PARTS, WIDTH, 1, 8, 1)
    if CARRIED:
        left = v - tl.where(upper, _rows(up, COLUMNS, PARTS), _rows(low, COLUMNS, PARTS))
        tl.store(new + i, left, mask=there)


@jit
def sides_encode(
    x: tl.tensor, old: tl.tensor, new: tl.tensor, payload: tl.tensor, head: tl.tensor, nbytes: tl.tensor, n: tl.tensor,
    column: tl.tensor, chunks: tl.tensor, sums: tl.tensor, counts: tl.tensor, columns: tl.tensor,
    CARRIED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FLAT: tl.constexpr,
) -> None:  # fmt: skip
    """Two means of columns of any length, whose sums are known."""
    first, last, row = tile(n, column, chunks, ROWS, WIDTH, FLAT)
    i = first + tl.arange(0, WIDTH)[None, :]
    there, real = i < last, row < columns
    sum_low = tl.load(sums + row, mask=real, other=0.0)
    sum_up = tl.load(sums + columns + row, mask=real, other=0.0)
    ones = tl.load(counts + row, mask=real, other=0)
    there_are = tl.minimum(row * column + column, n) - row * column
    low = tl.div_rn(sum_low, tl.maximum(there_are - ones, 1).to(tl.float32))
    up = tl.div_rn(sum_up, tl.maximum(ones, 1).to(tl.float32))
    begins = there & (i == row * column)
    tl.store(floats(payload) + 2 * row + tl.zeros_like(i), low + tl.zeros_like(i), mask=begins)
    tl.store(floats(payload) + 2 * row + 1 + tl.zeros_like(i), up + tl.zeros_like(i), mask=begins)
    v = joined(x, old, i, there, CARRIED)
    upper = (v >= 0.0) & there
    pack(upper.to(tl.int32), payload + head, first, last, nbytes, ROWS, WIDTH, 1, 8, 1)
    if CARRIED:
        tl.store(new + i, v - tl.where(upper, up, low), mask=there)


@jit
def signs_encode(
    x: tl.tensor, old: tl.tensor, new: tl.tensor, payload: tl.tensor, nbytes: tl.tensor, n: tl.tensor,
    chunks: tl.tensor, total: tl.tensor, count: tl.tensor, CARRIED: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, FLAT: tl.constexpr,
) -> None:  # fmt: skip
    """The mean of magnitudes, whose sum is known, and signs."""
    first, last, _ = tile(n, n, chunks, ROWS, WIDTH, FLAT)
    i = first + tl.arange(0, WIDTH)[None, :]
    there = i < last
    mean = tl.div_rn(tl.load(total), count)
    tl.store(floats(payload), mean, mask=tl.program_id(0) == 0)
    v = joined(x, old, i, there, CARRIED)
    upper = (v >= 0.0) & there
    pack(upper.to(tl.int32), payload + 4, first, last, nbytes, ROWS, WIDTH, 1, 8, 1)
    if CARRIED:
        tl.store(new + i, v - tl.where(upper, mean, -mean), mask=there)


@jit
def _sent(
    payload: tl.tensor, head: tl.tensor, nbytes: tl.tensor, row: tl.tensor, i: tl.tensor, there: tl.tensor,
    n: tl.tensor, column: tl.tensor, scale: tl.tensor, SIGNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Values of one payload, times the scale."""
    upper = unpack(payload + head, i, there, nbytes, 1, 1) > 0
    if SIGNS:
        up = tl.load(floats(payload)) * scale
        low = -up
    else:
        real = row * column < n
        low = tl.load(floats(payload) + 2 * row, mask=real, other=0.0) * scale
        up = tl.load(floats(payload) + 2 * row + 1, mask=real, other=0.0) * scale
    return tl.where(upper, up, low)


@jit
def decode(
    payloads: tl.tensor, stride: tl.tensor, ranks: tl.tensor, head: tl.tensor, nbytes: tl.tensor, out: tl.tensor,
    n: tl.tensor, column: tl.tensor, chunks: tl.tensor, scale: tl.tensor, ADD: tl.constexpr, SIGNS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FLAT: tl.constexpr,
) -> None:  # fmt: skip
    """The sum over ranks, in their order."""
    first, last, row = tile(n, column, chunks, ROWS, WIDTH, FLAT)
    i = first + tl.arange(0, WIDTH)[None, :]
    there = i < last
    if ADD:
        total = tl.load(out + i, mask=there, other=0.0)
        total += _sent(payloads, head, nbytes, row, i, there, n, column, scale, SIGNS)
    else:
        total = _sent(payloads, head, nbytes, row, i, there, n, column, scale, SIGNS)
    for _ in range(1, ranks):
        payloads += stride
        total += _sent(payloads, head, nbytes, row, i, there, n, column, scale, SIGNS)
    tl.store(out + i, total, mask=there)
