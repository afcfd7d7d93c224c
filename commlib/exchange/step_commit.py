"""Which steps count. A step leaves something behind only once it is known that it came through and was finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from commlib.codecs.memory_store import MemoryStore
from commlib.runtime.streams import Readback, accelerator, joined
from commlib.telemetry.recorder import TRACK
from commlib.telemetry.trace import NONE

_LARGE = 1e30
"""Scales: what is decoded by smaller ones cannot overflow in a sum over ranks."""


class StepCommit:
    """The step under way, bucket by bucket, and how many there were.

    A step that came out non-finite on any rank did so on all, for all decode the same bytes; so all ranks decide
    alike what becomes of it, without asking each other.

    Args:
        store: what codecs remember; committed or forgotten a step at a time.

    Attributes:
        count: steps that count.
        skipped: those that do not.
        complete: whether the last bucket of the step under way has been submitted.
        watched: whether the step under way may read or leave anything, so that it matters that it is finite. It
            follows from plan and count, and so is alike on all ranks.
        trace: in which those that do not count are recorded, when that is known: as the next one begins.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.trace = NONE
        self.count = self.skipped = 0
        self.complete = False
        self.watched, self._held = False, -1
        self._buckets: list[torch.futures.Future[Tensor]] = []
        self._finite: list[_Range] = []
        self._spare: list[_Range] = []
        self._discarded = self._undoable = False

    def begin(self, *, remembers: bool) -> None:
        """A step begins, by routes of which some remember or none does; one that broke off half-way is given up.

        What the former have left goes out in the first step of the latter that counts.
        """
        self._settle(abandon=True)
        self._undoable, self._store.step = False, self.count
        self._held = self.count + 1 if remembers else self._held
        self.watched = self.count <= self._held

    def submitted(self, bucket: torch.futures.Future[Tensor], *, last: bool) -> None:
        """Note that another bucket of this step is on its way."""
        self._buckets.append(bucket)
        self.complete = last

    def end(self) -> None:
        """No bucket will follow in this step, though the last one was none of it."""
        self.complete = bool(self._buckets)

    def under_way(self) -> Iterator[torch.futures.Future[Tensor]]:
        """Futures of the buckets that are under way."""
        yield from self._buckets

    def check(self, values: Tensor, scales: Sequence[Tensor] = ()) -> None:
        """Begin to check without waiting that ``values`` are finite; the step is rolled back if they are not.

        Args:
            values: of any shape.
            scales: float32; if there are any, they say that all values are finite, unless one is very large or is not.
        """
        range_ = self._spare.pop() if self._spare else _Range()
        range_.of(values, scales)
        self._finite.append(range_)

    def settle(self) -> None:
        """Decides what became of the last step, before anything reads or replaces what it left."""
        self._settle(abandon=False)

    def discard(self) -> bool:
        """The step just exchanged never happened; returns whether there was one."""
        undone = self._undoable
        if self._buckets:
            self._discarded = True
        elif undone:  # somebody has asked for what it left, and so committed it, meanwhile
            self._store.undo()
            self.count -= 1
            self.skipped += 1
            self._undoable = False
        return undone or bool(self._buckets)

    def resume(self, count: int) -> None:
        """Go on after so many, with a store that has been filled anew."""
        self._undoable = False
        self.count, self._held = count, count + 1

    def _settle(self, *, abandon: bool) -> None:
        if not self._buckets or not (self.complete or abandon):
            return
        finished = self.complete and all(_came_through(f) for f in self._buckets)
        if finished and not self._discarded and all(r.finite() for r in self._finite):
            self._store.commit()
            self.count += 1
            self._undoable = True
        else:
            self._undoable = False
            self._store.discard()
            self.skipped += 1
            self.trace.instant(TRACK, "skipped the step before", step=self.count, discarded=self._discarded)
        self._spare += self._finite
        self._buckets, self._finite = [], []
        self.complete = self._discarded = False


class _Range:
    """The least and largest value of a bucket, on their way to the host. (torch's ∞-norm takes ten times as long.)"""

    def __init__(self) -> None:
        self._ends = torch.zeros(2, dtype=torch.float32)
        self._copy = Readback()

    def of(self, values: Tensor, scales: Sequence[Tensor]) -> None:
        """Begins with other ones."""
        if (self._ends.dtype, self._ends.device) != (values.dtype, values.device):
            self._ends = values.new_zeros(2)
        self._ends.zero_()
        small = all(self._below(s, _LARGE) for s in scales) if scales else self._below(values, math.inf)
        if values.numel() and not small:
            torch.aminmax(values, out=(self._ends[0], self._ends[1]))  # a NaN is both
        self._copy.start(self._ends)

    def _below(self, values: Tensor, limit: float) -> bool:
        """Whether the root of their squares' sum is: on the CPU that is seen in two thirds of the time."""
        if values.dtype != torch.float32 or accelerator(values.device) is not None:
            return False
        torch.linalg.vector_norm(values, out=self._ends[0])
        return self._ends[0].item() < limit  # a NaN is not

    def finite(self) -> bool:
        """Whether they are; and then all its values are."""
        return all(map(math.isfinite, self._copy.get()))


def _came_through(future: torch.futures.Future[Tensor]) -> bool:
    try:
        future.wait()
        joined(future)
    except Exception:  # DDP has raised it to the user already
        return False
    return True
