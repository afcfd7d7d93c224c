"""Parameters in pieces, each of which a shard keeps: the keys of the parameter server. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor

NBYTES = 2 << 20
"""Of a chunk, at most: as Poseidon's pairs (USENIX ATC 2017, section 4.1)."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Values ``begin`` to ``end`` − 1 of a parameter, flattened.

    Args:
        name: the parameter's.
        begin, end: of its values.
        dtype: theirs.
    """

    name: str
    begin: int
    end: int
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """Its name on the ring and in messages."""
        return f"{self.name}[{self.begin}:{self.end}]"

    @property
    def nbytes(self) -> int:
        """Of its values."""
        return (self.end - self.begin) * self.dtype.itemsize

    def of(self, flat: Tensor) -> Tensor:
        """Its part of the parameter, (n,): a view."""
        return flat[self.begin : self.end]


def cut(parameters: Mapping[str, Tensor], nbytes: int = NBYTES) -> dict[str, tuple[Chunk, ...]]:
    """Name → its chunks: as few as there can be, and of equal lengths, to one value.

    Args:
        parameters: by name; any shape. One without values has no chunk.
        nbytes: of a chunk, at most.

    Raises:
        ValueError: a value does not fit into a chunk.
    """
    return {name: tuple(_chunks(name, p.numel(), p.dtype, nbytes)) for name, p in parameters.items()}


def _chunks(name: str, numel: int, dtype: torch.dtype, nbytes: int) -> list[Chunk]:
    most = nbytes // dtype.itemsize
    if most < 1:
        raise ValueError(f"a chunk of {nbytes} bytes has no room for a value of {dtype}")
    count = -(-numel // most)
    ends = [numel * i // count for i in range(count + 1)] if count else []
    return [Chunk(name, a, b, dtype) for a, b in pairwise(ends)]
