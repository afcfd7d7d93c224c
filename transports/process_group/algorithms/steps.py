"""Steps that a rank's part in a collective is made of.

A *schedule* is a generator: it yields :class:`Send`, :class:`Recv` and :class:`Free`, and computes in between. Whoever
drives it carries each step out, sends what a :class:`Recv` got into it, and knows nothing of the collective. Between
two ranks messages come in the order in which they were sent, and each is received by the step that it was sent for.

Nothing that was sent is copied. So a schedule must not write to it before it has arrived: it knows that from what it
received since (a sum that it is part of), or it asks for it by :class:`Free`. At the end of a schedule all is free.

A Send waits for nobody. A schedule that receives before it sends must be one of an order that has no cycle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Send:
    """Hand ``tensor``, (n,) and contiguous, n ≥ 1, over for rank ``to``."""

    to: int
    tensor: Tensor


@dataclasses.dataclass(frozen=True)
class Recv:
    """Wait for the next message of rank ``source``: as many values, of the same dtype, as ``like`` has.

    What comes back must be read before the next step, and not be written to.
    """

    source: int
    like: Tensor


@dataclasses.dataclass(frozen=True)
class Free:
    """Wait until all that was sent may be written to."""


Step = Send | Recv | Free
Schedule = Generator[Step, "Tensor | None", None]


@dataclasses.dataclass(frozen=True)
class Position:
    """This rank among the others.

    Args:
        rank: 0 … size − 1.
        size: P.
        piece: bytes of a message at most, so that a rank passes on the first while the next one comes.
    """

    rank: int
    size: int
    piece: int

    @property
    def right(self) -> int:
        """Rank that is next on the ring."""
        return (self.rank + 1) % self.size

    @property
    def left(self) -> int:
        """Rank that is before on the ring."""
        return (self.rank - 1) % self.size

    def others(self) -> list[int]:
        """The next one first: so not all begin with the same."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def sources(self) -> list[int]:
        """Ranks in the order in which they think of this one, by :meth:`others`."""
        return [(self.rank - k) % self.size for k in range(1, self.size)]

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """(n,) cut into messages; of nothing, none."""
        if flat.nbytes <= self.piece:
            return [flat] if flat.numel() else []
        return list(torch.split(flat, max(1, self.piece // flat.itemsize)))

    def segments(self, flat: Tensor) -> list[Tensor]:
        """(n,) cut into one part for each rank, alike to one value."""
        ends = [flat.numel() * p // self.size for p in range(self.size + 1)]
        return [flat[a:b] for a, b in pairwise(ends)]


@dataclasses.dataclass(frozen=True)
class Fold:
    """How values are reduced.

    Args:
        add: (into, of another rank), in place; shapes (n,).
        end: what is done to the finished result, in place: an average's division.
    """

    add: Callable[[Tensor, Tensor], object]
    end: Callable[[Tensor], object] = lambda total: None


def receive(source: int, like: Tensor) -> Generator[Step, Tensor | None, Tensor]:
    """A :class:`Recv`, and what came."""
    got = yield Recv(source, like)
    assert got is not None  # whoever drives this answers a Recv
    return got


def into(source: int, place: Position, out: Tensor) -> Schedule:
    """Receives ``out``, (n,), piece by piece."""
    for part in place.pieces(out):
        part.copy_((yield from receive(source, part)))


def to(target: int, place: Position, flat: Tensor) -> Schedule:
    """Sends ``flat``, (n,), piece by piece."""
    for part in place.pieces(flat):
        yield Send(target, part)


def cut(flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """(Σ lengths,) in parts of so many values."""
    return [flat[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
