"""The factors of one layer on their way through one step: a header and as many rows as are usual.

An all-gather wants the same number of bytes from every rank, but batches differ. So each rank sends a header with
its number of rows, and room for as many rows as any rank had lately; what is not filled is zeros. Only if a rank
has more (as in the first step) a second round follows: the rows again, with room for all; or an all-reduce of the
matrices, where that takes fewer bytes or where a rank has gradient that did not come from rows. Every rank decides
from the same headers, so all decide alike.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from commlib.collective import Payers
from commlib.errors import CommlibError
from commlib.exchange.item import World
from commlib.factors.payload import DTYPES, Payload, Room
from commlib.factors.tap import Rows

_HEADER = 16  # bytes: number of rows and flags, as int64
_DIRTY = 1 << 8  # flag: there is gradient besides the rows; the low byte is the index of the rows' dtype
_LATELY = 20  # steps after which room that nobody needed is given up

Way = Literal["gathered", "again", "summed"]
"""How a layer's step ends: with what has come, with the rows gathered again, or with the matrices all-reduced."""


class Habit:
    """How many rows a layer had lately, on the rank that had the most: the same on every rank."""

    def __init__(self) -> None:
        self.room = Room()
        self._needed: collections.deque[int] = collections.deque(maxlen=_LATELY)

    def expect(self, rows: int) -> None:
        """Have room for so many, of float32 unless steps have shown otherwise."""
        self.saw(rows, self.room.dtype)

    def saw(self, rows: int, dtype: torch.dtype) -> None:
        """A step needed room for so many (0: it was not worth gathering)."""
        self._needed.append(rows)
        self.room = Room(max(self._needed), dtype)


class Trip:
    """One layer in one step. It exists from when anybody asks for it, and starts when its turn has come.

    Args:
        payload: how its rows are written.
        habit: of the layer; takes note of this step.
        world: this rank.
        device: where the gradient is.
        seeds: of a random codec, for inputs and output gradients; asked for at the start, as lanes know no steps.
    """

    def __init__(
        self,
        payload: Payload,
        habit: Habit,
        world: World,
        device: torch.device,
        seeds: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._payload, self._ask_seeds, self._seeds = payload, seeds, (0, 0)
        self.world = world
        self._habit, self._room, self._device = habit, habit.room, device
        self._first = self._next = habit.room
        self._rows: list[Rows] = []
        self.late = False
        self._dtype, self._flags = self._room.dtype, 0
        self._out = torch.empty(0)
        self._works: list[Any] = []
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._way: Way | None = None
        self._all: Rows | None = None
        self._lock = threading.Lock()  # weight and bias may be in two buckets, and these in two lanes

    # -- the first round: issued in the order that all ranks keep, by the thread of the backward pass --

    def start(self, rows: Sequence[Rows], dirty: bool, group: Any) -> None:
        """Start the all-gather of what there is usually room for.

        Args:
            rows: what this rank has caught; empty if it did not use the layer.
            dirty: whether it has gradient besides: the matrices must then be summed.
            group: a process group that carries nothing else.

        Raises:
            TypeError: rows of a dtype that cannot travel.
        """
        self._rows, self._seeds = list(rows), self._ask_seeds()
        self._dtype = self._payload.dtype(self._rows, self._room.dtype)
        self._flags = DTYPES.index(self._dtype) + (_DIRTY if dirty else 0)
        self._gather(group, self._room, self.count <= self._room.rows and self._dtype == self._room.dtype)
        self._started.set()

    def add(self, rows: Sequence[Rows]) -> None:
        """There is gradient besides the rows that have left: these rows (already in no header), or other.

        All ranks then sum the matrices, once they have heard of it (:mod:`commlib.exchange.factors`).
        """
        self._rows += rows
        self.late = True

    def give_up(self, why: str) -> None:
        """It will never start: whoever waits is told."""
        if not self._started.is_set():
            self._error = CommlibError(why)
            self._started.set()

    @property
    def count(self) -> int:
        """Rows of this rank."""
        return sum(len(u) for u, _ in self._rows)

    def wait(self) -> None:
        """Until the last round that was issued is through."""
        self._started.wait()
        if self._error is not None:
            raise self._error
        self._works[-1].wait()

    def wire_bytes(self) -> float:
        """Bytes this rank sends in the first round, in a ring."""
        return (self.world.size - 1) * self._nbytes(self._first)

    def _gather(self, group: Any, room: Room, fits: bool) -> None:
        payload = torch.zeros(self._nbytes(room), dtype=torch.uint8, device=self._device)
        payload[:_HEADER].view(torch.int64).copy_(torch.tensor([self.count, self._flags]))
        if fits:
            self._payload.write(payload[_HEADER:], room, self._rows, self._seeds)
        self._room = room
        self._out = torch.empty(self.world.size * len(payload), dtype=torch.uint8, device=self._device)
        self._works.append(group._allgather_base(self._out, payload))

    def _nbytes(self, room: Room) -> int:
        return _HEADER + self._payload.nbytes(room)

    # -- what comes then, in the lanes --

    def way(self) -> Way:
        """How to go on, once the first round is through."""
        with self._lock:
            if self._way is None:
                self._way = self._decide()
            return self._way

    def _decide(self) -> Way:
        heads = [part[:_HEADER].view(torch.int64).tolist() for part in self._each()]
        most = max(rows for rows, _ in heads)
        dtypes = [DTYPES[flags & 0xFF] for rows, flags in heads if rows]
        dtype = dtypes[0] if dtypes else self._room.dtype
        for other in dtypes:
            dtype = torch.promote_types(dtype, other)
        size = self.world.size
        gathered = (size - 1) * self._nbytes(Room(most, dtype))
        summed = 2 * (size - 1) / size * self._payload.m * self._payload.n * torch.float32.itemsize
        worth = gathered < summed
        self._habit.saw(most if worth else 0, dtype)
        if any(flags & _DIRTY for _, flags in heads):
            return "summed"
        if most <= self._room.rows and all(d == self._room.dtype for d in dtypes):
            return "gathered"
        if worth:
            self._next = Room(most, dtype)
            return "again"
        return "summed"

    def again(self, group: Any) -> float:
        """Start the second all-gather, unless the layer's other parameter has; the bytes that takes this rank."""
        if len(self._works) > 1:
            return 0.0
        self._gather(group, self._next, True)
        return (self.world.size - 1) * self._nbytes(self._next)

    def everyone(self) -> Rows:
        """The rows of all ranks, in rank order, V divided by P; the same bits on every rank."""
        with self._lock:
            if self._all is None:
                self._all = self._unpack()
                self._out = torch.empty(0)
            return self._all

    def _unpack(self) -> Rows:
        us, vs = [], []
        for part in self._each():
            u, v = self._payload.read(part[_HEADER:], self._room, int(part[:_HEADER].view(torch.int64)[0]))
            us.append(u)
            vs.append(v)
        return _wide(torch.cat(us)), _wide(torch.cat(vs)) / self.world.size

    def own(self) -> Rows | None:
        """This rank's rows, or None."""
        if not self._rows:
            return None
        return _wide(torch.cat([u for u, _ in self._rows])), _wide(torch.cat([v for _, v in self._rows]))

    def _each(self) -> list[Tensor]:
        n = len(self._out) // self.world.size
        return [self._out[i * n : (i + 1) * n] for i in range(self.world.size)]


class First:
    """The first round as a collective of the exchange's: started elsewhere, waited for here."""

    def __init__(self, trip: Trip, payers: Payers) -> None:
        self.trip, self.payers = trip, payers
        self._bytes = trip.wire_bytes() if payers else 0.0

    def issue(self, group: Any) -> Any:
        """Its work: the trip."""
        return self.trip

    def wire_bytes(self, world: int) -> float:
        """Bytes this rank sends."""
        return self._bytes


class Again:
    """The second round, if there is one."""

    def __init__(self, trip: Trip, payers: Payers) -> None:
        self.trip, self.payers = trip, payers
        self._bytes = 0.0

    def issue(self, group: Any) -> Any:
        """Start it; its work is the trip."""
        self._bytes = self.trip.again(group)
        return self.trip

    def wire_bytes(self, world: int) -> float:
        """Bytes this rank sends."""
        return self._bytes


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
