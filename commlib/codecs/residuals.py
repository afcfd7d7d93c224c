"""Residuals in a shorter format than float32: what a value loses to it in one step comes back in others.

Rounded to the nearest, a small gradient would vanish in a large residual, step after step. So a residual is rounded up
where the bits that do not fit are above a bar, else down, and the bar goes from step to step through all it can be,
evenly: by multiples of the golden ratio (a Weyl sequence). Over n steps the errors of a value that is held add up to
O(log n) units in its last place, hence to nothing on average. The bar is the same for all values of a step: so
a residual does not depend on how layers are cut, nor on which of them are coded as one, and nothing is drawn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Formats of residuals, by name."""

_GOLDEN = 40503  # 2^16 times the golden ratio's fraction, to the nearest odd number: so all 2^16 bars come in turn
_LARGEST = torch.finfo(torch.bfloat16).max
_AT_ONCE = 1 << 16  # values that stay in a cache between the passes over them


def bar(step: int) -> int:
    """Bar of a step: what is added, of 2^16, to the bits that do not fit before they are cut off.

    Args:
        step: number of those that counted before it.
    """
    return (step + 1) * _GOLDEN & 0xFFFF


def shorten(values: Tensor, held: Tensor, up: int) -> None:
    """Keep values in a shorter format.

    Args:
        values: float32, contiguous; may be overwritten.
        held: bfloat16 of as many, contiguous; a finite value too large for it becomes the largest there is.
        up: the step's :func:`bar`.
    """
    floats, words = values.view(-1), held.view(-1).view(torch.int16)
    for part, kept in zip(_parts(floats), _parts(words), strict=True):
        # what is not finite stays so, whatever bits a NaN has, or a carry would make a number of it
        part.nan_to_num_(nan=math.nan, posinf=math.nan, neginf=math.nan).clamp_(-_LARGEST, _LARGEST)
        kept.copy_(part.view(torch.int32).add(up).bitwise_right_shift_(16))


def add(held: Tensor, out: Tensor, factor: float) -> None:
    """Add ``factor`` times what is held to as many float32 values, contiguous."""
    for part, kept in zip(_parts(out.view(-1)), _parts(held.view(-1)), strict=True):
        part.add_(kept, alpha=factor)


def _parts(flat: Tensor) -> tuple[Tensor, ...]:
    """Parts that are worked on at a time: on the CPU they stay in its caches."""
    return torch.split(flat, _AT_ONCE) if flat.device.type == "cpu" and len(flat) > _AT_ONCE else (flat,)
