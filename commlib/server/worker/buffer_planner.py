"""Where in one piece of memory each buffer lies, for what is known of when it is in use. Pure.

An iteration is a circle of operations that repeats, so a stay may begin in one and end in the next. Two that are never
in use at the same operation may have the same place. The largest are placed first, each as low as it goes: not the
least memory there can be (that is NP-hard), but never less than what is in use at once, and mostly that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence

ALIGN = 512
"""Bytes: every buffer begins at a multiple of it, as CUDA's allocator has it."""


@dataclasses.dataclass(frozen=True)
class BufferUse:
    """A buffer in use.

    Args:
        what: its name, of one stay only.
        begin: the first operation at which it is in use, from 0.
        length: operations, 1 or more; beyond the circle's end it goes on at its beginning.
        nbytes: of it.
    """

    what: Hashable
    begin: int
    length: int
    nbytes: int

    def at(self, operation: int, period: int) -> bool:
        """Whether it is in use then."""
        return (operation - self.begin) % period < self.length


@dataclasses.dataclass(frozen=True)
class BufferPlanner:
    """Places of buffers with known lifetimes in one piece of memory.

    Args:
        offsets: name → where it begins, in bytes.
        nbytes: of all.
    """

    offsets: Mapping[Hashable, int]
    nbytes: int


def meet(a: BufferUse, b: BufferUse, period: int) -> bool:
    """Whether there is an operation at which both are in use."""
    return (b.begin - a.begin) % period < a.length or (a.begin - b.begin) % period < b.length


def peak(stays: Iterable[BufferUse], period: int) -> int:
    """Bytes in use at once, at most, each rounded up to :data:`ALIGN`: no plan takes less."""
    listed = list(stays)
    return max((sum(_room(s) for s in listed if s.at(i, period)) for i in range(period)), default=0)


def plan(stays: Sequence[BufferUse], period: int) -> BufferPlanner:
    """A place for each.

    Args:
        stays: with names of their own.
        period: operations of an iteration.

    Raises:
        ValueError: a stay that is empty or begins outside the circle, or two of one name.
    """
    for s in stays:
        if not (0 <= s.begin < period and s.length > 0 and s.nbytes >= 0):
            raise ValueError(f"no stay in a circle of {period} operations: {s}")
    if len({s.what for s in stays}) < len(stays):
        raise ValueError("two stays have one name")
    placed: list[tuple[int, BufferUse]] = []
    for stay in sorted(stays, key=lambda s: (-s.nbytes, s.begin)):
        taken = sorted((at, at + _room(s)) for at, s in placed if meet(s, stay, period))
        placed.append((_lowest(taken, _room(stay)), stay))
    return BufferPlanner({s.what: at for at, s in placed}, max((at + _room(s) for at, s in placed), default=0))


def _room(stay: BufferUse) -> int:
    return -(-stay.nbytes // ALIGN) * ALIGN


def _lowest(taken: Iterable[tuple[int, int]], nbytes: int) -> int:
    """Lowest of the gaps between what is taken that is large enough."""
    at = 0
    for begin, end in taken:
        if begin - at >= nbytes:
            return at
        at = max(at, end)
    return at
