"""``int8``: blocks of bytes with one scale each."""

from __future__ import annotations

import dataclasses

from commlib.compressors.base.blockwise import Blockwise


@dataclasses.dataclass(frozen=True)
class Int8(Blockwise):
    """L = 127: one byte a value (level + 127), |error| ≤ absmax/254. Layout: :class:`Blockwise`.

    Args:
        block: values that share a float32 scale.
    """

    block: int = 256

    name = "int8"
    levels = 127
