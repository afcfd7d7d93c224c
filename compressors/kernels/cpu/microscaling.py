"""Loops of residuals as ``int8``: 32 values of a row share a scale. The layout: :mod:`commlib.codecs.residuals`."""

from __future__ import annotations

import typing
from typing import Any

import numpy as np
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.residuals import BLOCK, INFINITY, SLACK, WIDEST, BlockLoops
from commlib.compressors.kernels.cpu import simd
from commlib.compressors.kernels.cpu.jit import Floats, Scalar, jit

Codes = np.ndarray[Any, np.dtype[np.int8]]


class CompiledLoops(BlockLoops):
    """Loops by which residuals are kept and added, on the CPU."""

    def add(self, held: Tensor, out: Tensor) -> None:
        """Add what is held to as many float32 values, contiguous."""
        widen(*flat(held), 0, out.view(-1).numpy(), True)

    def shorten(self, values: Tensor, held: Tensor, up: int) -> None:
        """Same as ``residuals.shorten``; values are not modified."""
        shorten(values.view(-1).numpy(), *flat(held), 0, up)


def flat(held: Tensor) -> tuple[Codes, int]:
    """(all bytes in a row, values of a row), as the loops take them."""
    return typing.cast(Codes, held.view(-1).numpy()), residuals.width(held)


@jit
def widen(held: Codes, width: int, first: int, out: Floats, more: bool) -> None:
    """Write or add the values from ``first`` on, a multiple of 32, as many as ``out`` takes: a multiple of 32, too."""
    row, column = first // width, first % width
    begin = row * (width + width // BLOCK)
    for start in range(0, len(out), BLOCK):
        exponent = np.int32(np.uint8(held[begin + width + column // BLOCK]))
        scale = simd.as_float(np.int32(exponent << 23))
        if more:
            simd.add_block(held, begin + column, scale, out, start)
        else:
            simd.put_block(held, begin + column, scale, out, start)
        column += BLOCK
        if column == width:
            column, begin = 0, begin + width + width // BLOCK


@jit
def shorten(values: Floats, held: Codes, width: int, first: int, up: int) -> None:
    """Keep values from ``first`` on; both a multiple of 32."""
    bar, row, column = np.float32(up) / np.float32(65536), first // width, first % width
    begin = row * (width + width // BLOCK)
    for start in range(0, len(values), BLOCK):
        largest = simd.largest_of_block(values, start)
        exponent: Scalar = ((largest + SLACK) >> 23) - 6
        exponent = np.int32(min(max(exponent, 1), WIDEST))
        if largest >= INFINITY:
            exponent = np.int32(255)
            held[begin + column : begin + column + BLOCK] = 0
        else:
            factor = simd.as_float(np.int32((254 - exponent) << 23))
            simd.to_block(values, start, factor, bar, held, begin + column)
        held[begin + width + column // BLOCK] = np.int8(np.uint8(exponent))
        column += BLOCK
        if column == width:
            column, begin = 0, begin + width + width // BLOCK
