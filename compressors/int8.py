"""``int8``: blocks of bytes with one scale each."""

from __future__ import annotations

import dataclasses

from commlib.compressors.base.blockwise import BlockQuantized


@dataclasses.dataclass(frozen=True)
class Int8(BlockQuantized):
    """L = 127: one byte a value (level + 127), |error| ≤ absmax/254. Layout: :class:`BlockQuantized`.

    Args:
        block: values that share a float32 scale.
    """

    block: int = 256

    name = "int8"
    levels = 127
