"""Parameters in pieces, each of which a shard keeps: the keys of the parameter server. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

NBYTES = 2 << 20
"""Of a chunk, at most: as Poseidon's pairs (USENIX ATC 2017, section 4.1)."""
SMALL = 64 << 10
"""Parameters of fewer bytes share a chunk with their neighbours: a message costs as much as some ten thousand bytes."""

_LEAST = 128 << 10
_FILLS_S = 0.025


def fitting(gbit_s: float) -> int:
    """Bytes of a chunk on a link of this rate: the power of two next to what it carries in 25 ms, 128 KiB to 2 MiB.

    A message costs each side a part of a millisecond of a core, and a chunk's values cannot begin to come before all of
    it is there from all workers: so the time that it takes should be much more than the first, and much less than a
    step.
    """
    wanted = max(1.0, gbit_s * 1e9 / 8 * _FILLS_S)
    return int(min(max(2 ** round(math.log2(wanted)), _LEAST), NBYTES))


def in_group(group: int | None) -> str:
    """Suffix of a key that a group of shards keeps."""
    return "" if group is None else f"@{group}"


def group_of(key: str) -> int:
    """Number of the shard group that keeps a key: what the key ends with (:func:`in_group`); 0 without."""
    tail = key.rpartition("]")[2].rpartition("@")[2]
    return int(tail) if tail.isdecimal() else 0


@dataclasses.dataclass(frozen=True)
class ParameterPiece:
    """Values ``begin`` to ``end`` − 1 of a parameter, flattened."""

    name: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Values that travel and are updated together: a piece of one parameter, or several small parameters.

    Args:
        pieces: in this order.
        dtype: of all.
        group: of shards that keep them; None: there is but one.
    """

    pieces: tuple[ParameterPiece, ...]
    dtype: torch.dtype
    group: int | None = None

    @property
    def key(self) -> str:
        """Name of the chunk on the hash ring and in messages."""
        first, more = self.pieces[0], len(self.pieces) - 1
        return f"{first.name}[{first.begin}:{first.end}]" + (f"+{more}" if more else "") + in_group(self.group)

    @property
    def numel(self) -> int:
        """Number of values in all pieces."""
        return sum(p.end - p.begin for p in self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk's values."""
        return self.numel * self.dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chunk's parameters."""
        return tuple(p.name for p in self.pieces)

    def gather(self, flat: Mapping[str, Tensor]) -> Tensor:
        """Values of the chunk, (n,), out of flat parameters: a view of one piece, a copy of several."""
        parts = [flat[p.name][p.begin : p.end] for p in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def scatter(self, values: Tensor, flat: Mapping[str, Tensor]) -> None:
        """Puts its values, (n,), where they belong; ``flat`` may be on another device."""
        begin = 0
        for p in self.pieces:
            end = begin + p.end - p.begin
            flat[p.name][p.begin : p.end].copy_(values[begin:end])
            begin = end


def cut(
    parameters: Mapping[str, Tensor],
    nbytes: int = NBYTES,
    *,
    small: int = SMALL,
    alike: Callable[[str], Hashable] = lambda name: None,
    whole: Callable[[str], bool] = lambda name: False,
) -> list[Chunk]:
    """Chunks with every value once, in the order of parameters.

    Large parameters are in as few chunks as there can be, of equal lengths to one value.

    Args:
        parameters: by name; any shape. One without values is in no chunk.
        nbytes: of a chunk, at most.
        small: parameters of fewer bytes share chunks of at most so many; 0: none does.
        alike: only parameters for which this is the same may share a chunk, and of the same dtype.
        whole: parameters that may neither be cut nor share a chunk, however large.

    Raises:
        ValueError: a value does not fit into a chunk.
    """
    return list(_chunks(parameters, nbytes, min(small, nbytes), alike, whole))


def _chunks(
    parameters: Mapping[str, Tensor],
    nbytes: int,
    small: int,
    alike: Callable[[str], Hashable],
    whole: Callable[[str], bool],
) -> Iterator[Chunk]:
    open_: dict[tuple[Hashable, torch.dtype], list[ParameterPiece]] = {}
    for name, p in parameters.items():
        size = p.dtype.itemsize
        if whole(name):
            yield Chunk((ParameterPiece(name, 0, p.numel()),), p.dtype)
        elif p.numel() * size >= small:
            yield from (Chunk((ParameterPiece(name, a, b),), p.dtype) for a, b in _ranges(p, nbytes))
        elif p.numel():
            row = open_.setdefault((alike(name), p.dtype), [])
            if size * (p.numel() + sum(r.end - r.begin for r in row)) > small:
                yield Chunk(tuple(row), p.dtype)
                row.clear()
            row.append(ParameterPiece(name, 0, p.numel()))
    yield from (Chunk(tuple(row), dtype) for (_, dtype), row in open_.items() if row)


def _ranges(p: Tensor, nbytes: int) -> Iterator[tuple[int, int]]:
    most = nbytes // p.dtype.itemsize
    if most < 1:
        raise ValueError(f"a chunk of {nbytes} bytes has no room for a value of {p.dtype}")
    count = -(-p.numel() // most)
    return pairwise([p.numel() * i // count for i in range(count + 1)] if count else [])
