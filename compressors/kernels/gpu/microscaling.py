"""Kernels of residuals as ``int8``: 32 values of a row share a scale. The layout: :mod:`commlib.codecs.residuals`.

Adding and keeping are passes of their own, before and after a codec's: tiles of its own are cut otherwise.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.residuals import BlockLoops
from commlib.compressors.kernels.gpu.jit import jit, launch
from commlib.compressors.kernels.gpu.tiles import INFINITE, MAGNITUDE, as_bits, as_float

BLOCK = tl.constexpr(residuals.BLOCK)
SLACK = tl.constexpr(residuals.SLACK)
WIDEST = tl.constexpr(residuals.WIDEST)
STEP = tl.constexpr(2.0**-16)
_ROWS = 64  # blocks of a program


class TritonLoops(BlockLoops):
    """Loops by which residuals are kept and added, on a GPU."""

    def add(self, held: Tensor, out: Tensor) -> None:
        """Add what is held to as many float32 values, contiguous."""
        if blocks := out.numel() // residuals.BLOCK:
            args = (held, out, blocks, residuals.width(held))
            launch(_add, -(-blocks // _ROWS), out, *args, ROWS=_ROWS)

    def shorten(self, values: Tensor, held: Tensor, up: int) -> None:
        """Same as ``residuals.shorten``; values are not modified."""
        if blocks := values.numel() // residuals.BLOCK:
            args = (values, held, blocks, residuals.width(held), up)
            launch(_shorten, -(-blocks // _ROWS), values, *args, ROWS=_ROWS)


@jit
def _blocks(blocks: tl.tensor, width: tl.tensor, ROWS: tl.constexpr) -> tuple[tl.tensor, ...]:
    """(which blocks there are, index of each one's first value, of its first code, and of its scale)."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = block * BLOCK
    row, column = first // width, first % width
    begin = row * (width + width // BLOCK)
    return block < blocks, first, begin + column, begin + width + column // BLOCK


@jit
def _add(held: tl.tensor, out: tl.tensor, blocks: tl.tensor, width: tl.tensor, ROWS: tl.constexpr) -> None:
    there, first, codes, scale = _blocks(blocks, width, ROWS)
    k = tl.arange(0, BLOCK)[None, :]
    exponent = tl.load(held.to(tl.pointer_type(tl.uint8)) + scale, mask=there, other=0).to(tl.int32)
    values = tl.load(held + codes + k, mask=there, other=0).to(tl.float32) * as_float(exponent << 23)
    at = out + first + k
    tl.store(at, tl.load(at, mask=there, other=0.0) + values, mask=there)


@jit
def _shorten(
    values: tl.tensor, held: tl.tensor, blocks: tl.tensor, width: tl.tensor, bar: tl.tensor, ROWS: tl.constexpr
) -> None:
    there, first, codes, scale = _blocks(blocks, width, ROWS)
    k = tl.arange(0, BLOCK)[None, :]
    v = tl.load(values + first + k, mask=there, other=0.0)
    largest = tl.max(as_bits(v) & MAGNITUDE, axis=1)[:, None]
    exponent = tl.minimum(tl.maximum(((largest + SLACK) >> 23) - 6, 1), WIDEST)
    up = bar.to(tl.float32) * STEP
    w = v * as_float((254 - exponent) << 23)
    whole = tl.where(w < 0.0, w - up, w + up).to(tl.int32)
    finite = largest < INFINITE
    whole = tl.where(finite, tl.minimum(tl.maximum(whole, -127), 127), 0)
    tl.store(held + codes + k, whole.to(tl.int8), mask=there)
    kept = tl.where(finite, exponent, 255).to(tl.uint8)
    tl.store(held.to(tl.pointer_type(tl.uint8)) + scale, kept, mask=there)
