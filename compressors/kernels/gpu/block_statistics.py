"""Kernels for statistics of blocks too large for one program: sums, in `sums.fold`'s order, and maxima."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from commlib.compressors.kernels.gpu.jit import jit, launch
from commlib.compressors.kernels.gpu.tiles import (
    BLOCK,
    MAGNITUDE,
    as_bits,
    as_float,
    cut,
    halved,
    joined,
    normal,
    tile,
    units,
)

ROWS = 2  # of 1024 values, in a program


@jit
def _maxima(
    x: tl.tensor, old: tl.tensor, maxima: tl.tensor, n: tl.tensor, block: tl.tensor, chunks: tl.tensor,
    CARRIED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FLAT: tl.constexpr,
) -> None:  # fmt: skip
    first, last, row = tile(n, block, chunks, ROWS, WIDTH, FLAT)
    i = first + tl.arange(0, WIDTH)[None, :]
    found = as_bits(joined(x, old, i, i < last, CARRIED)) & MAGNITUDE
    largest = tl.max(found, axis=1)[:, None]
    tl.atomic_max(maxima + row, largest, mask=first < last, sem="relaxed")


def maxima(x: Tensor, old: Tensor, carried: bool, block: int, out: Tensor) -> None:
    """The bits of the largest |x|, or |x + old|, of each block → int32 ``out``; infinity is above all, NaN above it."""
    out.zero_()
    tiles = cut(x.numel(), block)
    args = (x, old, out, x.numel(), min(block, x.numel()), tiles.chunks)
    launch(_maxima, tiles.programs, x, *args, CARRIED=carried, **tiles.shape)


@jit
def _part(
    q: tl.tensor, n: tl.tensor, block: tl.tensor, parts: tl.tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(block, indices, which are there) of the q-th 1024 values, if every block has ``parts`` of them."""
    row = q // parts
    j = q % parts * BLOCK + tl.arange(0, BLOCK)[None, :]
    i = row * block + j
    return row, i, (j < block) & (i < n)


@jit
def _sides(
    x: tl.tensor, old: tl.tensor, sums: tl.tensor, counts: tl.tensor, n: tl.tensor, block: tl.tensor, parts: tl.tensor,
    blocks: tl.tensor, CARRIED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    q = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row, i, there = _part(q, n, block, parts, ROWS, BLOCK)
    v = joined(x, old, i, there, CARRIED)
    upper = v >= 0.0
    real = q < blocks * parts
    lower = tl.where(upper, 0.0, v)
    tl.store(sums + q, halved(lower, ROWS, BLOCK)[:, None], mask=real)
    tl.store(sums + blocks * parts + q, halved(tl.where(upper, v, 0.0), ROWS, BLOCK)[:, None], mask=real)
    tl.atomic_add(counts + row, tl.sum((upper & there).to(tl.int64), axis=1)[:, None], mask=real, sem="relaxed")


@jit
def _sizes(
    x: tl.tensor, old: tl.tensor, sums: tl.tensor, n: tl.tensor, block: tl.tensor, parts: tl.tensor, blocks: tl.tensor,
    CARRIED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    q = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    _, i, there = _part(q, n, block, parts, ROWS, BLOCK)
    sizes = tl.abs(joined(x, old, i, there, CARRIED))
    tl.store(sums + q, halved(sizes, ROWS, BLOCK)[:, None], mask=q < blocks * parts)


@jit
def _squares(
    x: tl.tensor, old: tl.tensor, sums: tl.tensor, maxima: tl.tensor, n: tl.tensor, block: tl.tensor, parts: tl.tensor,
    blocks: tl.tensor, CARRIED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    q = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    row, i, there = _part(q, n, block, parts, ROWS, BLOCK)
    real = q < blocks * parts
    up, down, _ = normal(as_float(tl.load(maxima + row, mask=real, other=0)))
    y = units(joined(x, old, i, there, CARRIED), up, down)
    tl.store(sums + q, halved(y * y, ROWS, BLOCK)[:, None], mask=real)


@jit
def _fold(sums: tl.tensor, out: tl.tensor, parts: tl.tensor, fewer: tl.tensor, BLOCK: tl.constexpr) -> None:
    program = tl.program_id(0).to(tl.int64)
    row, j = program // fewer, program % fewer * BLOCK + tl.arange(0, BLOCK)[None, :]
    some = tl.load(sums + row * parts + j, mask=j < parts, other=0.0)
    tl.store(out + program + tl.arange(0, 1), halved(some, 1, BLOCK))


def folded(sums: Tensor) -> Tensor:
    """Sums of rows, shape (rows, parts) → (rows,)."""
    rows, parts = sums.shape
    while parts > 1:
        fewer = -(-parts // BLOCK)
        out = sums.new_empty(rows, fewer)
        launch(_fold, rows * fewer, sums, sums, out, parts, fewer, BLOCK=BLOCK)
        sums, parts = out, fewer
    return sums.view(-1)


def _shape(n: int, block: int) -> tuple[int, int, int]:
    """(blocks, parts of 1024 values of each, programs)."""
    blocks, parts = -(-n // block), -(-min(block, n) // BLOCK)
    return blocks, parts, -(-blocks * parts // ROWS)


def sides(x: Tensor, old: Tensor, carried: bool, block: int) -> tuple[Tensor, Tensor]:
    """(sums of the values below zero of each block, then of the others; how many others), of x or x + old."""
    n = x.numel()
    blocks, parts, programs = _shape(n, block)
    sums, counts = x.new_empty(2 * blocks, parts), x.new_zeros(blocks, dtype=torch.int64)
    args = (x, old, sums, counts, n, min(block, n), parts, blocks)
    launch(_sides, programs, x, *args, CARRIED=carried, ROWS=ROWS, BLOCK=BLOCK)
    return folded(sums), counts


def sizes(x: Tensor, old: Tensor, carried: bool) -> Tensor:
    """The sum of |x|, or of |x + old|, shape (1,)."""
    n = x.numel()
    _, parts, programs = _shape(n, n)
    sums = x.new_empty(1, parts)
    launch(_sizes, programs, x, x, old, sums, n, n, parts, 1, CARRIED=carried, ROWS=ROWS, BLOCK=BLOCK)
    return folded(sums)


def squares(x: Tensor, old: Tensor, carried: bool, block: int, largest: Tensor) -> Tensor:
    """The sums of squares of each block of x, or x + old, in units of its largest (of :func:`maxima`)."""
    n = x.numel()
    blocks, parts, programs = _shape(n, block)
    sums = x.new_empty(blocks, parts)
    args = (x, old, sums, largest, n, min(block, n), parts, blocks)
    launch(_squares, programs, x, *args, CARRIED=carried, ROWS=ROWS, BLOCK=BLOCK)
    return folded(sums)
