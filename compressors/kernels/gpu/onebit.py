"""Kernels of the codecs of one bit a value.

Arguments named alike mean the same in all files of kernels: ``old`` and ``new`` are of a carry (x itself, and neither
read nor written, where there is none), ``head`` is where a payload's packed numbers begin, ``nbytes`` how many bytes
these are.
"""

from __future__ import annotations

import triton.language as tl

from commlib.compressors.kernels.gpu.jit import jit
from commlib.compressors.kernels.gpu.tiles import floats, halved, joined, leave, pack, tile, unpack


@jit
def _whole(
    values: tl.tuple, UPPER: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums of a side of columns in PARTS rows each, whose values are CHUNKS tensors, (COLUMNS·PARTS, LANES)."""
    chunks: tl.tuple = ()
    for k in tl.static_range(CHUNKS):
        above = values[k] >= 0.0
        chunks += (tl.where(above, values[k], 0.0) if UPPER else tl.where(above, 0.0, values[k]),)
    for step in tl.static_range(10):
        if CHUNKS >> step > 1:
            fewer: tl.tuple = ()
            for k in tl.static_range(CHUNKS >> (step + 1)):
                fewer += (chunks[k] + chunks[k + (CHUNKS >> (step + 1))],)
            chunks = fewer
    rows = halved(chunks[0], COLUMNS * PARTS, LANES)
    return halved(tl.reshape(rows, (COLUMNS, PARTS)), COLUMNS, PARTS)


@jit
def _rows(x: tl.tensor, COLUMNS: tl.constexpr, PARTS: tl.constexpr) -> tl.tensor:
    """A number of each column for each of its rows, shape (COLUMNS,) → (COLUMNS·PARTS, 1)."""
    return tl.reshape(tl.broadcast_to(x[:, None], (COLUMNS, PARTS)), (COLUMNS * PARTS, 1))


@jit
def columns_encode(
    x: tl.tensor, old: tl.tensor, new: tl.tensor, bar: tl.tensor, payload: tl.tensor, head: tl.tensor,
    nbytes: tl.tensor, n: tl.tensor, column: tl.tensor, CARRIED: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Two means, and all else, of columns that fit into a program: PARTS rows of CHUNKS·LANES values each.

    A row's chunks are tensors of their own, of which a thread has the same places of each, and a warp rows of its own:
    so the first halvings are additions within a thread, the next ones within a warp, and only the parts of a column are
    summed across warps. (In one tensor Triton gives a row to all warps, and halves it by way of shared memory.)
    """
    begin = tl.program_id(0).to(tl.int64) * COLUMNS
    r = tl.arange(0, COLUMNS * PARTS)[:, None]
    row = (begin + r // PARTS) * column
    first, last = row + r % PARTS * (CHUNKS * LANES), tl.minimum(row + column, n)
    values: tl.tuple = ()
    ones = tl.zeros((COLUMNS * PARTS, LANES), tl.int32)
    for k in tl.static_range(CHUNKS):
        i = first + k * LANES + tl.arange(0, LANES)[None, :]
        v = joined(x, old, i, i < last, CARRIED)
        ones += ((v >= 0.0) & (i < last)).to(tl.int32)
        values += (v,)
    many = tl.sum(tl.reshape(tl.sum(ones, axis=1), (COLUMNS, PARTS)), axis=1)
    c = begin + tl.arange(0, COLUMNS)
    there_are = (tl.minimum(c * column + column, n) - c * column).to(tl.int32)
    low = tl.div_rn(
        _whole(values, False, COLUMNS, PARTS, CHUNKS, LANES), tl.maximum(there_are - many, 1).to(tl.float32)
    )
    up = tl.div_rn(_whole(values, True, COLUMNS, PARTS, CHUNKS, LANES), tl.maximum(many, 1).to(tl.float32))
    tl.store(floats(payload) + 2 * c, low, mask=c * column < n)
    tl.store(floats(payload) + 2 * c + 1, up, mask=c * column < n)
    low_of, up_of = _rows(low, COLUMNS, PARTS), _rows(up, COLUMNS, PARTS)
    for k in tl.static_range(CHUNKS):
        i = first + k * LANES + tl.arange(0, LANES)[None, :]
        above = (values[k] >= 0.0) & (i < last)
        bits, begins = above.to(tl.int32), first + k * LANES
        pack(bits, payload + head, begins, last, nbytes, COLUMNS * PARTS, LANES, 1, 8, 1)
        if CARRIED:
            leave(new, i, values[k] - tl.where(above, up_of, low_of), bar, i < last)


@jit
def sides_encode(
    x: tl.tensor, old: tl.tensor, new: tl.tensor, bar: tl.tensor, payload: tl.tensor, head: tl.tensor,
    nbytes: tl.tensor, n: tl.tensor, column: tl.tensor, chunks: tl.tensor, sums: tl.tensor, counts: tl.tensor,
    columns: tl.tensor, CARRIED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FLAT: tl.constexpr,
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
        leave(new, i, v - tl.where(upper, up, low), bar, there)


@jit
def signs_encode(
    x: tl.tensor, old: tl.tensor, new: tl.tensor, bar: tl.tensor, payload: tl.tensor, nbytes: tl.tensor, n: tl.tensor,
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
        leave(new, i, v - tl.where(upper, mean, -mean), bar, there)


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
