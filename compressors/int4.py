"""``int4``: blocks of half-bytes with one scale each."""

from __future__ import annotations

import dataclasses

from commlib.compressors.base.blockwise import BlockQuantized


@dataclasses.dataclass(frozen=True)
class Int4(BlockQuantized):
    """L = 7: two values a byte (level + 7, the first in the low half), |error| ≤ absmax/14. Layout:
    :class:`BlockQuantized`.

    Args:
        block: values that share a float32 scale.
    """

    block: int = 128

    name = "int4"
    levels = 7
