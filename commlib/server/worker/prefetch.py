"""Gradients out of a device's memory, and values into it, in the background and in buffers planned ahead.

After GeePS (Cui et al., EuroSys 2016): one iteration is recorded, and every next one is foretold by it: which chunk's
values are needed next, and which buffers are free by then. So values are moved in ``ahead`` operations before they are
needed, gradients have as long to be moved out, and one piece of the device's memory, planned once, is enough for all:
some ``ahead`` + 1 chunks each way. What comes otherwise than foretold gets memory of its own, and is as right.

Ordering: :meth:`push`, :meth:`values` and the rest are called by the thread that trains (and autograd's, while that one
waits for it). Two threads work for it. One hands gradients to the client, in the order of pushes, each when its copy
has left the device. The other waits for values, in the order in which they are needed, and begins their copy in; before
that it waits until the push that asks for them is handed over. The first never waits for the second: so none for ever.

*No buffer is used twice at a time.* Planned stays of one place do not meet
(:mod:`commlib.server.worker.buffer_planner`). One ends with an operation: of values, with the copy out of the buffer
that whoever takes them gives the device; so a later copy in waits for all that it was given (a mark). Of a gradient,
``ahead`` operations after its push: whoever comes next waits for the newest copy out that has so ended, all in their
stream, never the thread that trains.

What a worker does in an iteration, in which order: recorded once, and the same ever after, or recorded anew. Pure.

GeePS (EuroSys 2016, section 4) has an application go through one iteration that only says what it will read and update,
and works out buffers and indexes from that. Here the first iteration is a real one. One that turns out to be another is
noticed at the first operation that differs; from there on nothing is foretold until the next one.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from commlib.runtime.streams import CopyStream, StreamEvent, accelerator, host
from commlib.server.job.chunks import Chunk
from commlib.server.worker.buffer_planner import BufferPlanner, BufferUse, plan

T = TypeVar("T", bound=Hashable)


class KeySequence(Generic[T]):
    """Sequence of one worker's operations, which repeats from step to step."""

    def __init__(self) -> None:
        self._known: tuple[T, ...] | None = None
        self._now: list[T] = []
        self._as_known = False

    @property
    def known(self) -> tuple[T, ...] | None:
        """The operations of an iteration, as the last one was; None: there was none yet."""
        return self._known

    @property
    def foretold(self) -> bool:
        """Whether this iteration has been the known one so far."""
        return self._as_known

    @property
    def at(self) -> int:
        """Operations of this iteration so far."""
        return len(self._now)

    def note(self, operation: T) -> bool:
        """Takes note of what is done now; whether it is what was foretold."""
        i = len(self._now)
        self._now.append(operation)
        if self._as_known:
            assert self._known is not None
            self._as_known = i < len(self._known) and self._known[i] == operation
        return self._as_known

    def end(self) -> bool:
        """The iteration is over; whether what is known is another now, and all that was worked out from it void."""
        same = self._as_known and len(self._now) == len(self._known or ())
        if not same:
            self._known = tuple(self._now)
        self._now, self._as_known = [], True
        return not same


Values = tuple[Tensor, Mapping[int, int]]
_Operation = tuple[str, str]  # push or take, and the key


class ValueSource(Protocol):
    """Source of values (:class:`~commlib.server.worker.client.ClientNode`)."""

    def values(self, key: str) -> Values: ...


@dataclasses.dataclass
class _Out:
    """A gradient's copy on its way out: which operation of all it was, and when it is done."""

    number: int
    done: StreamEvent


class PrefetchCache:
    """Cache of one worker's values on its device, until :meth:`close`.

    Args:
        answers: who has the values, when they have come.
        chunks: of the parameters.
        device: where these are.
        ahead: operations by which values are moved in before they are needed, and gradients may take to be moved out.

    Raises:
        ValueError: ``ahead`` is below 1.
    """

    def __init__(self, answers: ValueSource, chunks: Rows[Chunk], device: torch.device, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is 1 operation or more, got {ahead}")
        self._answers, self._chunks = answers, {c.key: c for c in chunks}
        self._device, self._ahead = device, ahead
        self._sequence: KeySequence[_Operation] = KeySequence()
        self._rooms, self._arena = BufferPlanner({}, 0), torch.empty(0, dtype=torch.uint8, device=device)
        self._number = 0  # operations ever
        self._outs: collections.deque[_Out] = collections.deque()
        self._past = StreamEvent()  # of the newest that may have had to make room
        self._handed: dict[str, Future[None]] = {}  # key → its newest push
        self._asked: set[str] = set()  # keys whose values nobody is waiting for yet
        self._coming: dict[str, Future[tuple[Values, StreamEvent]]] = {}
        self._out_lane, self._in_lane = CopyStream(device), CopyStream(device)
        self._hands = ThreadPoolExecutor(1, "commlib-cache-out")
        self._fetches = ThreadPoolExecutor(1, "commlib-cache-in")
        self.plans = 0
        """How often an iteration was another than the one before, and buffers were planned."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory, for what is foretold."""
        return self._rooms.nbytes

    def push(self, key: str, parts: Rows[Tensor], send: Callable[[Tensor], None]) -> None:
        """Moves a gradient out, and hands it on in another thread.

        Args:
            key: whose.
            parts: of it, each (n,), as they lie on the device; not needed any more when this returns.
            send: takes all of it, (n,), in the host's memory; its own.

        Raises:
            CommlibError: what had gone wrong before.
        """
        self.settle(key)
        row = self._row(("push", key))
        self._ended().hold()
        torch.cat(list(parts), out=row)
        there = host(row.numel(), row.dtype, self._device)
        done = self._out_lane.copy(there, row, self._out_lane.now())
        self._outs.append(_Out(self._number, done))
        self._handed[key] = self._hands.submit(_hand, there, row, done, send)
        self._foresee()

    def asked(self, key: str) -> None:
        """Note that a key's values have been asked for; any of an earlier question are void. Those that are to come are
        taken."""
        self._coming.pop(key, None)
        self._asked.add(key)

    def values(self, key: str) -> Values:
        """Values that were asked for, (n,) on the device, and whose pushes are in them.

        They stay until the next call of this or :meth:`push`: what is made of them is given to the device before that.

        Raises:
            CommlibError: as the client says.
        """
        row = self._row(("take", key))
        coming = self._coming.pop(key, None) or self._fetch(key, row)
        self._foresee()
        found, done = coming.result()
        done.hold()
        return found

    def settle(self, key: str | None = None) -> None:
        """Waits until what was pushed (of a key, or of all) is handed over.

        Raises:
            CommlibError: what went wrong when it was.
        """
        for each in list(self._handed) if key is None else [key]:
            if each in self._handed:
                self._handed[each].result()

    def end_step(self) -> None:
        """An iteration is over. If it was another than the one before, buffers are planned for one like it."""
        if not self._sequence.end():
            return
        known = self._sequence.known or ()
        self._rooms = plan([self._stay(i, *operation) for i, operation in enumerate(known)], len(known))
        # Rows of the old one hold it as long as they are needed.
        self._arena = torch.empty(self._rooms.nbytes, dtype=torch.uint8, device=self._device)
        self.plans += 1

    def close(self) -> None:
        """Ends its threads; again: nothing. What was pushed is handed over, or the client refuses it."""
        self._hands.shutdown()
        self._fetches.shutdown(cancel_futures=True)

    # -- buffers --------------------------------------------------------------------------------

    @property
    def _reach(self) -> int:
        """Operations before or after its own for which a buffer is kept: less than an iteration, for it has one."""
        return min(self._ahead, len(self._sequence.known or ()) - 1)

    def _stay(self, i: int, kind: str, key: str) -> BufferUse:
        """Use of memory by operation i: gradients from it on, values until it."""
        begin = i if kind == "push" else (i - self._reach) % len(self._sequence.known or ())
        return BufferUse(i, begin, self._reach + 1, self._chunks[key].nbytes)

    def _row(self, operation: _Operation) -> Tensor:
        """A buffer for what is done now: the planned one, if it was foretold."""
        i, self._number = self._sequence.at, self._number + 1
        if self._sequence.note(operation):
            return self._planned(i)
        chunk = self._chunks[operation[1]]
        return torch.empty(chunk.numel, dtype=chunk.dtype, device=self._device)

    def _planned(self, i: int) -> Tensor:
        chunk = self._chunks[(self._sequence.known or ())[i][1]]
        begin = self._rooms.offsets[i]
        return self._arena[begin : begin + chunk.nbytes].view(chunk.dtype)

    def _ended(self) -> StreamEvent:
        """The newest copy out whose buffer may have been given to somebody else."""
        while self._outs and self._outs[0].number < self._number - self._reach:
            self._past = self._outs.popleft().done
        return self._past

    # -- values ---------------------------------------------------------------------------------

    def _foresee(self) -> None:
        """Begins with the values that are needed next, as far as they are asked for and their buffers are free."""
        known = self._sequence.known
        if not known or not self._sequence.foretold:
            return
        at = self._sequence.at - 1  # the operation of now
        for i in range(at + 1, at + self._reach + 1):
            kind, key = known[i % len(known)]
            if kind == "take" and key in self._asked:
                self._coming[key] = self._fetch(key, self._planned(i % len(known)))

    def _fetch(self, key: str, row: Tensor) -> Future[tuple[Values, StreamEvent]]:
        self._asked.discard(key)
        return self._fetches.submit(self._move, key, row, self._handed.get(key), self._in_lane.now(), self._ended())

    def _move(
        self, key: str, row: Tensor, handed: Future[None] | None, *after: StreamEvent
    ) -> tuple[Values, StreamEvent]:
        """Move values to the device, in the thread that waits for them."""
        if handed is not None:
            handed.result()  # what asks for them
        values, included = self._answers.values(key)
        there = values
        if accelerator(self._device) is not None:
            there = host(values.numel(), values.dtype, self._device)
            there.copy_(values)
        return (row, included), self._in_lane.copy(row, there, *after)


def _hand(there: Tensor, row: Tensor, done: StreamEvent, send: Callable[[Tensor], None]) -> None:
    """Hand over a gradient, in a thread of its own; ``row`` is only held until its copy is done."""
    done.wait()
    send(there)
