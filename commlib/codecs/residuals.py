"""Residuals in a shorter format than float32: what a value loses to it in one step comes back in others.

Rounded to the nearest, a small gradient would vanish in a large residual, step after step. So a residual is rounded up
where the bits that do not fit are above a bar, else down, and the bar goes from step to step through all it can be,
evenly: by multiples of the golden ratio (a Weyl sequence). Over n steps the errors of a value that is held add up to
O(log n) units in its last place, hence to nothing on average. The bar is the same for all values of a step: so
a residual does not depend on how layers are cut, nor on which of them are coded as one, and nothing is drawn.

As ``int8``, 32 values of a row share a scale that is a power of two, of one byte (as MXINT8 of the OCP Microscaling
Formats Specification v1.0, but -127 is the least). A row is its values, one byte each, then their scales: rows of a
residual can be taken from it as from any tensor. All that is held is a float32 number, and shortening it again leaves
it as it is, so a checkpoint loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
"""Formats of residuals, by name."""
BLOCK = 32
"""Values that share a scale, as ``int8``."""
SLACK = (1 << 23) - 1 - 0x7E0000
"""Added to the bits of a float32, carries into its exponent if it is more than 127 times a power of two, and more than
half of the next such number."""
WIDEST = 248
"""The largest exponent of a scale: 127 times it is a number yet."""
INFINITY = 0x7F800000
"""Its bits; those of what is no number are above."""

_GOLDEN = 40503  # 2^16 times the golden ratio's fraction, to the nearest odd number: so all 2^16 bars come in turn
_LARGEST = torch.finfo(torch.bfloat16).max
_AT_ONCE = 1 << 16  # values that stay in a cache between the passes over them


def bar(step: int) -> int:
    """Bar of a step: what is added, of 2^16, to the bits that do not fit before they are cut off.

    Args:
        step: number of those that counted before it.
    """
    return (step + 1) * _GOLDEN & 0xFFFF


class BlockLoops(Protocol):
    """Compiled loops over ``int8``, with the same results."""

    def add(self, held: Tensor, out: Tensor) -> None:
        """As :func:`add` by a factor of 1."""

    def shorten(self, values: Tensor, held: Tensor, up: int) -> None:
        """Same as :func:`shorten`."""


compiled: dict[str, BlockLoops] = {}
"""Kind of device → those of :mod:`commlib.compressors`, once they are loaded."""


def dtype_of(name: str, shape: Sequence[int]) -> torch.dtype:
    """Format in which a layer's residual is kept: ``int8`` takes rows of whole blocks, others are bfloat16."""
    whole = len(shape) > 1 and math.prod(shape[1:]) % BLOCK == 0
    return torch.bfloat16 if name == "int8" and not whole else DTYPES[name]


def room(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of the tensor that holds values of this shape."""
    if dtype != torch.int8:
        return tuple(shape)
    values = math.prod(shape[1:])
    return shape[0], values + values // BLOCK


def width(held: Tensor) -> int:
    """Values of a row that is held as ``int8``."""
    return held.shape[1] // (BLOCK + 1) * BLOCK


def spacing(held: Tensor) -> Tensor:
    """How far apart the numbers are that what is held can be, at each of its values: float64, of their number."""
    if held.dtype == torch.int8:
        return _scales(held).double().repeat_interleave(BLOCK)
    return torch.finfo(held.dtype).eps * held.double().abs().view(-1)


def relative(dtype: torch.dtype) -> float:
    """By how much of the largest value one may change when it is held."""
    return 2 / 127 if dtype == torch.int8 else float(torch.finfo(dtype).eps)


def shorten(values: Tensor, held: Tensor, up: int) -> None:
    """Keep values in a shorter format.

    Args:
        values: float32, contiguous; may be overwritten.
        held: room for as many, contiguous, bfloat16 or int8; a finite value too large for it becomes the largest there
            is. What is not finite is not a number where it is held, as ``int8`` with all of its block.
        up: the step's :func:`bar`.
    """
    if held.dtype == torch.int8 and (loops := compiled.get(held.device.type)):
        loops.shorten(values, held, up)
        return
    if held.dtype == torch.int8:
        for part, rows in _by_rows(values, held):
            _shorten_blocks(part, rows, up)
        return
    floats, words = values.view(-1), held.view(-1).view(torch.int16)
    for part, kept in zip(_parts(floats), _parts(words), strict=True):
        # what is not finite stays so, whatever bits a NaN has, or a carry would make a number of it
        part.nan_to_num_(nan=math.nan, posinf=math.nan, neginf=math.nan).clamp_(-_LARGEST, _LARGEST)
        kept.copy_(part.view(torch.int32).add(up).bitwise_right_shift_(16))


def add(held: Tensor, out: Tensor, factor: float) -> None:
    """Add ``factor`` times what is held to as many float32 values, contiguous."""
    if held.dtype == torch.int8 and factor == 1 and (loops := compiled.get(held.device.type)):
        loops.add(held, out)
        return
    if held.dtype == torch.int8:
        for part, rows in _by_rows(out, held):
            part.add_(_widened(rows), alpha=factor)
        return
    for part, kept in zip(_parts(out.view(-1)), _parts(held.view(-1)), strict=True):
        part.add_(kept, alpha=factor)


def widen(held: Tensor) -> Tensor:
    """Values of what is held, float32, as many; itself, if it is float32."""
    return _widened(held).view(-1) if held.dtype == torch.int8 else held.to(torch.float32)


def convert(values: Tensor, held: Tensor) -> None:
    """Keep as many values in whatever format, each as the number next to it.

    Args:
        values: held in any format; not modified.
        held: room for them in any format.
    """
    if held.dtype == torch.int8:
        shorten(widen(values).clone(memory_format=torch.contiguous_format), held, 1 << 15)
    else:
        held.view(-1).copy_(widen(values).reshape(-1))


def exact(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether float32 values are held in this format as they are."""
    held = torch.empty(room(values.shape, dtype), dtype=dtype, device=values.device)
    convert(values, held)
    return torch.equal(widen(held).view(values.shape), values)


def scale(held: Tensor, factor: float) -> None:
    """Multiply what is held."""
    if held.dtype == torch.int8:
        convert(widen(held) * factor, held)
    else:
        held.mul_(factor)


def _shorten_blocks(values: Tensor, held: Tensor, up: int) -> None:
    """Blocks of values, shape (rows, blocks, 32), overwritten; see :func:`shorten`."""
    bits = values.abs().amax(-1).view(torch.int32)
    exponents = (bits + SLACK).bitwise_right_shift_(23).sub_(6).clamp_(1, WIDEST)  # of the least scale that has room
    exponents.masked_fill_(bits >= INFINITY, 255)
    factors = (254 - exponents).clamp_(min=1).bitwise_left_shift_(23).view(torch.float32)
    values.mul_(factors.unsqueeze(-1))
    codes = values.add_(values.sign(), alpha=up / 65536).trunc_()
    codes.clamp_(-127, 127).masked_fill_((bits >= INFINITY).unsqueeze(-1), 0.0)
    end = width(held)
    held[:, :end].copy_(codes.view(len(held), end))
    held[:, end:].view(torch.uint8).copy_(exponents)


def _widened(held: Tensor) -> Tensor:
    """Values, shape (rows, blocks, 32), float32."""
    end = width(held)
    values = held[:, :end].to(torch.float32).view(len(held), end // BLOCK, BLOCK)
    return values.mul_(_scales(held).unsqueeze(-1))


def _scales(held: Tensor) -> Tensor:
    """Scales, shape (rows, blocks), float32; infinite of a block that is no number."""
    return held[:, width(held) :].view(torch.uint8).to(torch.int32).bitwise_left_shift_(23).view(torch.float32)


def _by_rows(values: Tensor, held: Tensor) -> zip[tuple[Tensor, Tensor]]:
    """Parts of both, rows of blocks, that are worked on at a time."""
    row = width(held)
    blocks = values.view(len(held), row // BLOCK, BLOCK)
    rows = max(1, _AT_ONCE // max(1, row) if held.device.type == "cpu" else len(held))
    return zip(torch.split(blocks, rows), torch.split(held, rows), strict=True)


def _parts(flat: Tensor) -> tuple[Tensor, ...]:
    """Parts that are worked on at a time: on the CPU they stay in its caches."""
    return torch.split(flat, _AT_ONCE) if flat.device.type == "cpu" and len(flat) > _AT_ONCE else (flat,)
