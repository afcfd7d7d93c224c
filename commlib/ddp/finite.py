"""What is looked at to see whether a bucket came out finite: where codecs have scales these, not all the values again.

A value that is decoded is a scale times at most two. So where the scales are finite it is, and they are few.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from commlib.exchange.layer_task import Item

LARGE = 1 << 16
"""Values: of a smaller layer they are read as fast as its scales are found."""


def spans(buffer: Tensor, items: Sequence[Item]) -> list[tuple[Tensor, Sequence[Tensor]]]:
    """A bucket in consecutive pieces, each with the scales that vouch for it; none if only its values can.

    Args:
        buffer: the flat bucket, exchanged.
        items: that were; their gradients are views of it.
    """
    found: list[tuple[Tensor, Sequence[Tensor]]] = []
    at = 0
    vouched = [item for item in items if item.scales and item.grad.numel() >= LARGE]
    for item in sorted(vouched, key=lambda each: each.grad.storage_offset()):
        start = int(item.grad.storage_offset() - buffer.storage_offset())
        found += [(buffer[at:start], ()), (item.grad, item.scales)]
        at = start + item.grad.numel()
    return [(values, scales) for values, scales in [*found, (buffer[at:], ())] if values.numel()]
