"""The factors of one layer on their way through one step: as many rows as are usual.

A collective wants the same number of bytes from every rank, but batches differ. So each rank sends room for as many
rows as any rank had lately; what is not filled is zeros. When DDP asks for the bucket, a word of each rank follows: how
many rows it has, and whether there is other gradient. Words go from host to host, so that nobody waits for a device to
know how to go on. Only if a rank has more rows (as in the first step) a second round follows: the rows again, with room
for all; or an all-reduce of the matrices, where that takes fewer bytes or where a rank has gradient that did not come
from rows. Every rank decides from the same words, so all decide alike. To whom rows go is for
:mod:`commlib.exchange.factors.delivery` to know.
"""

from __future__ import annotations

import collections
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from commlib.errors import CommlibError
from commlib.exchange.collectives import Payers
from commlib.exchange.factors.delivery import RowDelivery
from commlib.exchange.factors.guard import DTYPES
from commlib.exchange.factors.payload import RowCapacity
from commlib.exchange.factors.tap import Rows
from commlib.runtime.streams import StreamEvent, accelerator, now

Word = tuple[int, int]
"""What a rank says of its rows: how many there are; the index of their dtype, and flags."""
WORD = 16
"""Bytes of a word, two int64."""
_OTHER = 1 << 8  # flag: there is gradient besides the rows; the low byte is the index of their dtype
_ROUNDING, _ROUNDING_SHORT = 1e-3, 0.05
"""Difference that rounding explains, relative to the largest value of a rank's gradient: of rows of float32 or float64,
which are added in another order, and of shorter ones, whose product is rounded before it is reduced."""
_LATELY = 20  # steps after which room that nobody needed is given up

Way = Literal["gathered", "again", "summed"]
"""How a layer's step ends: with what has come, with the rows sent again, or with the matrices all-reduced."""


class RowHistory:
    """How many rows a layer had lately, on the rank that had the most: the same on every rank."""

    def __init__(self) -> None:
        self.room = RowCapacity()
        self._needed: collections.deque[int] = collections.deque(maxlen=_LATELY)

    def expect(self, rows: int) -> None:
        """Have room for so many, of float32 unless steps have shown otherwise."""
        self.saw(rows, self.room.dtype)

    def saw(self, rows: int, dtype: torch.dtype) -> None:
        """A step needed room for so many (0: it was not worth gathering)."""
        self._needed.append(rows)
        self.room = RowCapacity(max(self._needed), dtype)


class FactorRounds:
    """Rounds of one layer's rows in one step, made when anybody asks for them and started when their turn has come.

    Args:
        sending: to whom its rows go.
        habit: of the layer; takes note of this step.
        device: where the gradient is.
        seeds: of a random codec, for inputs and output gradients; asked for at the start, as lanes know no steps.
    """

    def __init__(
        self,
        sending: RowDelivery,
        habit: RowHistory,
        device: torch.device,
        seeds: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._sending, self._ask_seeds, self._seeds = sending, seeds, (0, 0)
        self._habit, self._room, self._device = habit, habit.room, device
        self._first = self._next = habit.room
        self._rows: list[Rows] = []
        self.late = self._dirty = False
        self._dtype, self._counts = self._room.dtype, [0]
        self._out = self._letter = torch.empty(0, dtype=torch.uint8, device=device)
        self._work: Any = None
        self._again = False
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._way: Way | None = None
        self._all: Rows | None = None
        self._made = StreamEvent()
        self.proving = False
        """Whether what is in the bucket is the true gradient, to be reduced beside the rows and compared."""
        self.summed = False
        """Whether nothing could be compared, because this rank had gradient besides that of its rows."""
        self.sizes: dict[str, float] = {}
        """Kind of parameter → mean over ranks of the largest value of each rank's own gradient."""
        self.difference: float | None = None
        """Largest difference of both, in multiples of what rounding explains; None if they were not compared."""
        self._lock = threading.Lock()  # weight and bias may be in two buckets, and these in two lanes

    # -- where the exchanged gradient is compared with that of a dense exchange --

    def compare(self, made: Tensor, truth: Tensor, kind: str) -> str:
        """Compare what the rows have made of a parameter's gradient with the mean of the true ones, of the same shape.

        Args:
            made: by the rows.
            truth: by an all-reduce.
            kind: of the parameter, for its entry in ``sizes``.

        Returns:
            What is wrong; empty if rounding explains the difference.
        """
        size = self.sizes[kind]
        off = float((made.double() - truth.double()).abs().max()) if truth.numel() else 0.0
        if not (math.isfinite(size) and math.isfinite(off)):  # a step that overflowed proves nothing, if both did
            off = 0.0 if bool(made.isfinite().all()) == bool(truth.isfinite().all()) else math.inf
            size = 1.0
        bound = _ROUNDING if self._room.dtype.itemsize >= 4 else _ROUNDING_SHORT
        self.difference = max(self.difference or 0.0, off / (bound * size) if size else off / bound)
        if self.difference <= 1:
            return ""
        at = int((made - truth).abs().argmax())
        mine, true = float(made.reshape(-1)[at]), float(truth.reshape(-1)[at])
        return (
            f"on rank {self._sending.world.rank} the {kind} gradient that its rows made is {mine:g} at value {at}, and "
            f"the mean of the true ones is {true:g}, more than rounding explains"
        )

    # -- the first round: issued in the order that all ranks keep, by the thread of the backward pass --

    def load(self, rows: Sequence[Rows], dirty: bool) -> None:
        """Take the rows that are to be sent; before :meth:`start`.

        Args:
            rows: what this rank has caught; empty if it did not use the layer.
            dirty: whether it has gradient besides: the matrices must then be summed.

        Raises:
            TypeError: rows of a dtype that cannot travel.
        """
        self._rows, self._seeds, self._dirty = list(rows), self._ask_seeds(), dirty
        self._dtype = self._sending.payload.dtype(self._rows, self._room.dtype)

    def start(self, group: Any) -> None:
        """Send what there is usually room for, over a process group whose order all ranks keep."""
        self._send(group, self._room, self.count <= self._room.rows and self._dtype == self._room.dtype)
        self._started.set()

    def add(self, rows: Sequence[Rows]) -> None:
        """There is gradient besides the rows that have left: these rows, or other. All ranks then sum the matrices."""
        self._rows += rows
        self.late = True

    @property
    def foreign(self) -> bool:
        """Whether this rank has gradient besides that of its rows."""
        return self._dirty or self.late

    def give_up(self, why: str) -> None:
        """Abort before the first round: raise ``CommlibError(why)`` in all threads that wait."""
        if not self._started.is_set():
            self._error = CommlibError(why)
            self._started.set()

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M) of the weight."""
        return self._sending.shape

    @property
    def count(self) -> int:
        """Rows of this rank."""
        return sum(len(u) for u, _ in self._rows)

    def wait(self) -> None:
        """Wait until the last round that was issued is through."""
        self._started.wait()
        if self._error is not None:
            raise self._error
        if self._work is not None:
            self._work.wait()
        self._keep(self._out, self._letter)

    def wire_bytes(self) -> float:
        """Bytes this rank sends in the first round."""
        return self._sending.sent(self._first) if self._first.rows else 0.0

    def _send(self, group: Any, room: RowCapacity, fits: bool) -> None:
        self._room, rows = room, self._rows if fits else None
        self._work = None
        if room.rows:  # else there is none on any rank
            self._out, self._letter, self._work = self._sending.start(group, self._device, room, rows, self._seeds)

    def _keep(self, *tensors: Tensor) -> None:
        """They were made on the stream of the backward pass, and are in use on this one."""
        if (by := accelerator(self._device)) is not None:
            for tensor in tensors:
                by.keep(tensor, by.current(self._device))

    # -- what comes then, in the lanes --

    def word(self) -> Word:
        """Word of this rank about its rows, once all have come."""
        return self.count, DTYPES.index(self._dtype) + (_OTHER if self.foreign else 0)

    def way(self, words: Sequence[Word]) -> Way:
        """How to go on with a parameter, by all ranks' words, in rank order.

        Where the layer's two parameters are in two buckets, words of both may differ in one thing: whether there is
        other gradient by now.
        """
        with self._lock:
            if self._way is None:
                self._way = self._decide(words)
            return "summed" if _other(words) else self._way

    def _decide(self, words: Sequence[Word]) -> Way:
        self._counts = [rows for rows, _ in words]
        most = max(self._counts)
        dtypes = [DTYPES[flags & 0xFF] for rows, flags in words if rows]
        dtype = dtypes[0] if dtypes else self._room.dtype
        for other in dtypes:
            dtype = torch.promote_types(dtype, other)
        worth = self._pays(RowCapacity(most, dtype))
        # a layer that is summed again and again sends none
        self._habit.saw(most if worth and not _other(words) else 0, dtype)
        if most <= self._room.rows and all(d == self._room.dtype for d in dtypes):
            return "gathered"
        if worth:
            self._next = RowCapacity(most, dtype)
            return "again"
        return "summed"

    def _pays(self, room: RowCapacity) -> bool:
        """Whether so many rows a rank take fewer bytes than an all-reduce of the matrices."""
        size, (n, m) = self._sending.world.size, self.shape
        summed = 2 * (size - 1) / size * n * m * torch.float32.itemsize
        return self._sending.busiest(room) + (size - 1) * WORD < summed

    def again(self, group: Any) -> float:
        """Send the rows once more, unless the layer's other parameter has; the bytes that takes this rank."""
        if self._again:
            return 0.0
        self._again = True
        self._keep(*(x for rows in self._rows for x in rows))
        self._send(group, self._next, True)
        return self._sending.sent(self._next)

    def everyone(self) -> Rows:
        """The rows of all ranks, in rank order, V divided by P, as far as they are sent here.

        U is (ΣK, inputs), V (ΣK, outputs) of what this rank multiplies. What several ranks get is the same bits.
        """
        with self._lock:
            if self._all is None:
                self._all, self._made = self._unpack(), now(self._device)
                self._out = self._letter = self._out[:0].clone()
            self._made.hold()  # weight and bias may be in two buckets, and these on two streams
            self._keep(*self._all)
            return self._all

    def _unpack(self) -> Rows:
        us, vs = [], []
        n = len(self._out) // self._sending.world.size
        for rank, count in enumerate(self._counts):
            u, v = self._sending.payload.read(self._out[rank * n : rank * n + n], self._room, count)
            us.append(u)
            vs.append(v)
        return _wide(torch.cat(us)), _wide(torch.cat(vs)) / self._sending.world.size

    def own(self) -> Rows | None:
        """This rank's rows, or None."""
        if not self._rows:
            return None
        self._keep(*(x for rows in self._rows for x in rows))
        return _wide(torch.cat([u for u, _ in self._rows])), _wide(torch.cat([v for _, v in self._rows]))


class First:
    """The first round as a collective of the exchange's: started elsewhere, waited for here."""

    def __init__(self, trip: FactorRounds, payers: Payers) -> None:
        self.trip, self.payers = trip, payers
        self._bytes = trip.wire_bytes() if payers else 0.0

    def issue(self, group: Any) -> Any:
        """Work handle of the rounds, which were started elsewhere."""
        return self.trip

    def wire_bytes(self, world: int) -> float:
        """Bytes this rank sends."""
        return self._bytes


class Again:
    """The second round, if there is one."""

    def __init__(self, trip: FactorRounds, payers: Payers) -> None:
        self.trip, self.payers = trip, payers
        self._bytes = 0.0

    def issue(self, group: Any) -> Any:
        """Start it; its work is the trip."""
        self._bytes = self.trip.again(group)
        return self.trip

    def wire_bytes(self, world: int) -> float:
        """Bytes this rank sends."""
        return self._bytes


def _other(words: Sequence[Word]) -> bool:
    """Whether any rank has gradient besides that of its rows."""
    return any(flags & _OTHER for _, flags in words)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
