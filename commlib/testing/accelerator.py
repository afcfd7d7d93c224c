"""Simulated accelerator: tensors of the CPU stand for a device's, and a use that streams do not order is an error.

    with SimulatedAccelerator() as gpu:
        …  # a training with commlib
    assert gpu.waits == []

What is asked for is done at once. Simulated is what a device with CUDA's streams would guarantee: a stream does its
work in order, and is behind another one only where an event or ``wait_stream`` says so. Every stream, and the host, has
a vector clock (Fidge 1988, Mattern 1989), and every range of memory the last write and the reads since then. A use
whose clock does not cover them could come first on a device: that is a race, whether or not it would ever show.

Memory is handed out as by PyTorch's caching allocator: what is freed may at once be given to whoever asks on the stream
where it was allocated. So a use on another stream must be behind that one's clock by then, or announced by
``record_stream``.

It sees torch operators, in threads that are in its context or in :meth:`SimulatedAccelerator.use`. Loops that numba
compiles are not seen: take the reference (``COMMLIB_KERNELS=reference``). Memory of the host is what :meth:`pinned`
made; every other tensor is the device's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commlib.errors import CommlibError
from commlib.runtime.streams import simulated

_HOST = 0
Clock = dict[int, int]
"""Stream → how many of its operations are done, as far as is known."""


class StreamRace(CommlibError):
    """Use of memory that no stream and no event orders behind another use of it."""


class SimulatedStream:
    """Queue of a device's work, as ``torch.cuda.Stream``.

    Args:
        by: accelerator that it is of.
        name: for errors.
    """

    def __init__(self, by: SimulatedAccelerator, name: str) -> None:
        self._by, self.name = by, name
        self.number = by.enter(self)
        self.clock: Clock = {}

    def wait_stream(self, other: SimulatedStream) -> None:
        """Later work of this stream is behind all that the other one has."""
        merge(self.clock, other.clock)

    def wait_event(self, event: SimulatedEvent) -> None:
        """Later work of this stream is behind the event; one that was never recorded is past."""
        merge(self.clock, event.clock)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """An event at the end of all that it has been given so far."""
        event = event or SimulatedEvent(self._by)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for all it has."""
        self._by.host_waits("stream.synchronize()", self.clock)

    def __repr__(self) -> str:
        return self.name


class SimulatedEvent:
    """Moment in a stream's work, as ``torch.cuda.Event``.

    Args:
        by: accelerator that it is of.
    """

    def __init__(self, by: SimulatedAccelerator) -> None:
        self._by, self.clock = by, Clock()
        self._at_s, self._behind = 0.0, list[_Later]()

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Take the stream's work so far; by default the current one's."""
        self.clock = dict((stream or self._by.current()).clock)
        self._at_s, self._behind = time.perf_counter(), self._by.of(self.clock)

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Make a stream wait for it; by default the current one."""
        (stream or self._by.current()).wait_event(self)

    def query(self) -> bool:
        """Whether the host knows that it is past."""
        return covers(self._by.host, self.clock)

    def synchronize(self) -> None:
        """The host waits for it. Not counted: what is asked for a step later is there."""
        self._by.finish(self.clock)
        merge(self._by.host, self.clock)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Milliseconds from this one to another."""
        return 1e3 * (end.at_s - self.at_s)

    @property
    def at_s(self) -> float:
        """When all before it was done, if it is: the host does most of what a stream is given at once."""
        return max([self._at_s, *(each.at_s for each in self._behind)])


@dataclasses.dataclass(eq=False)
class _Later:
    """Operation of a stream that another thread does."""

    stream: int
    tick: int
    done: Future[Any]
    at_s: float = 0.0

    def note(self, done: Future[Any]) -> None:
        """Note that the operation is done. Who waits calls it as well: a future wakes him before it calls back."""
        self.at_s = self.at_s or time.perf_counter()


@dataclasses.dataclass(frozen=True)
class Access:
    """Use of some bytes of a storage.

    Args:
        first, last: bytes, the last one excluded.
        writes: whether it may have changed them.
        stream: number of the stream.
        tick: which operation of it.
        what: its name and where it was asked for.
    """

    first: int
    last: int
    writes: bool
    stream: int
    tick: int
    what: str


@dataclasses.dataclass
class SimulatedMemory:
    """Storage that is in use.

    Args:
        alive: expires with it.
        home: number of the stream on which it was allocated.
        of_host: whether it is pinned memory.
        kept: numbers of the streams that it was recorded on.
        accesses: the uses that a later one must be behind.
    """

    alive: Any
    home: int
    of_host: bool = False
    kept: set[int] = dataclasses.field(default_factory=set)
    accesses: list[Access] = dataclasses.field(default_factory=list)


class SimulatedAccelerator:
    """Accelerator that is simulated; a context in which the CPU's tensors are its own, and every use is checked.

    Attributes:
        streams: all there are, by number.
        host: what the host knows to be done.
        waits: why the host has waited for the device, each time.
        operations: how many were seen.

    Raises:
        StreamRace: from the operation that is not ordered; or, where memory was freed, from the next one.
    """

    def __init__(self) -> None:
        self._lock, self._local = threading.RLock(), threading.local()
        self._numbers = itertools.count(1)
        self.streams: dict[int, SimulatedStream] = {}
        self._memory: dict[int, SimulatedMemory] = {}
        self._freed: dict[int, list[Access]] = {}  # by the stream of what was freed: uses that it may not be behind
        self._done: weakref.WeakKeyDictionary[Any, Clock] = weakref.WeakKeyDictionary()
        self._later: list[_Later] = []
        self.host: Clock = {}
        self.waits: list[str] = []
        self.operations = 0
        self._default = SimulatedStream(self, "default stream")
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> SimulatedAccelerator:
        self._contexts.enter_context(simulated(self))
        for name in ("tolist", "numpy"):  # no operators, and modes for functions see nothing in a backward pass
            self._contexts.enter_context(mock.patch.object(Tensor, name, self._reading(name)))
        self._contexts.enter_context(self.use(self._default))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._contexts.close()

    def _reading(self, name: str) -> Callable[..., Any]:
        read: Callable[..., Any] = getattr(Tensor, name)

        def seen(tensor: Tensor, *args: Any, **options: Any) -> Any:
            self.host_reads(tensor, f"Tensor.{name}")
            return read(tensor, *args, **options)

        return seen

    # -- as commlib.runtime.streams.Accelerator --

    def stream(self, device: torch.device, name: str = "") -> SimulatedStream:
        """A new one."""
        made = SimulatedStream(self, name)
        made.name = name or f"stream {made.number}"
        return made

    def current(self, device: torch.device | None = None) -> SimulatedStream:
        """Stream of this thread."""
        found: SimulatedStream = getattr(self._local, "stream", self._default)
        return found

    @contextlib.contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        """Make it this thread's stream, whose operators are seen."""
        before, watched = self.current(), getattr(self._local, "watched", False)
        self._local.stream, self._local.watched = stream, True
        try:
            with contextlib.ExitStack() as modes:
                if not watched:
                    modes.enter_context(_Operators(self))
                yield
        finally:
            self._local.stream, self._local.watched = before, watched

    def event(self, *, timing: bool = False) -> SimulatedEvent:
        """A new one."""
        return SimulatedEvent(self)

    def keep(self, tensor: Tensor, stream: SimulatedStream) -> None:
        """Same as ``Tensor.record_stream``."""
        self._of(tensor).kept.add(stream.number)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """SimulatedMemory of the host."""
        with torch._C._DisableTorchDispatch():
            made = torch.empty(shape, dtype=dtype)
        self._of(made).of_host = True
        return made

    def has(self, tensor: Tensor) -> bool:
        """Whether it is not memory of the host."""
        return not self._of(tensor).of_host

    def wait(self, device: torch.device) -> None:
        """The host waits for all streams."""
        for stream in self.streams.values():
            self.host_waits("synchronize()", stream.clock)

    def future(self, *devices: torch.device) -> torch.futures.Future[Any]:
        """A new one."""
        return torch.futures.Future()

    def complete(self, future: torch.futures.Future[Any], value: object) -> None:
        """Set its value, behind the current stream."""
        self._done[future] = dict(self.current().clock)
        future.set_result(value)

    def joined(self, future: torch.futures.Future[Any]) -> None:
        """Order the current stream behind its value."""
        merge(self.current().clock, self._done.get(future, {}))

    # -- what streams, events and modes tell --

    def enter(self, stream: SimulatedStream) -> int:
        """A new stream's number; its clock begins where the host is."""
        number = next(self._numbers)
        self.streams[number] = stream
        return number

    def later(self, done: Future[Any]) -> None:
        """Says that what the current stream was given last is done with this future.

        Threads wait for it where they would do what is ordered behind it; it must not wait for them.
        """
        stream = self.current()
        self._later.append(_Later(stream.number, stream.clock[stream.number], done))
        done.add_done_callback(self._later[-1].note)

    def of(self, clock: Clock) -> list[_Later]:
        """Returns what there is of it that is not yet known to be done."""
        return [each for each in list(self._later) if clock.get(each.stream, 0) >= each.tick]

    def finish(self, clock: Clock, but: int | None = None) -> None:
        """Wait until all of this is done, a stream excepted."""
        for each in self.of(clock):
            if each.stream != but:
                each.done.result()
                each.note(each.done)
                with contextlib.suppress(ValueError):  # another thread was faster
                    self._later.remove(each)

    def host_waits(self, why: str, clock: Clock) -> None:
        """The host waits until this is done."""
        if not covers(self.host, clock):
            self.waits.append(f"{why} at {_place()}")
        self.finish(clock)
        merge(self.host, clock)

    def host_reads(self, tensor: Tensor, what: str) -> None:
        """The host reads a tensor. Of the device's it waits for the current stream, as a copy to the host does."""
        with self._lock:
            device = self.has(tensor)
        if device:
            self.finish(self.current().clock)  # not under the lock: others go on meanwhile
        with self._lock:
            if device:
                self.waits.append(f"{what} at {_place()}")  # even if all is done: on a device that is not known before
                merge(self.host, self.current().clock)
            self._access([(tensor, False)], what, _HOST)

    def ran(
        self,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        what: str,
        *,
        waits: bool = False,
        allocates: bool = False,
    ) -> None:
        """An operator was given to the current stream; one that has none of the device's tensors is the host's.

        Args:
            reads, writes: tensors.
            what: its name.
            waits: the host waits for it, if it copies between the two.
            allocates: some of what it writes is new memory, which may have been another tensor's.
        """
        with self._lock:
            self.operations += 1
            self._see_what_was_freed()
            if allocates:
                self._reuse(self.current(), what)
            used = [*((t, False) for t in reads), *((t, True) for t in writes)]
            where = {self.has(t) for t, _ in used if t.numel()}
            if not where:
                return
            stream = self.current()
            self._access(used, what, stream.number if True in where else _HOST)
            if waits and where == {True, False}:
                self.host_waits(what, stream.clock)

    def _access(self, used: Sequence[tuple[Tensor, bool]], what: str, number: int) -> None:
        clock = self.host if number == _HOST else self.streams[number].clock
        merge(clock, self.host)
        clock[number] = tick = clock.get(number, 0) + 1
        name = f"{what} at {_place()}"
        for tensor, writes in used:
            if not tensor.numel():
                continue
            memory, (first, last) = self._of(tensor), extent(tensor)
            for a in memory.accesses:
                apart = a.last <= first or last <= a.first or not (a.writes or writes)
                if not apart and clock.get(a.stream, 0) < a.tick:
                    raise StreamRace(
                        f"{name} {'writes' if writes else 'reads'} a tensor of shape {tuple(tensor.shape)} on "
                        f"{self._name(number)}, which is not behind {self._name(a.stream)}, where {a.what} "
                        f"{'wrote' if a.writes else 'read'} it: let the stream wait for the other one, or for an event"
                    )
            if writes:
                memory.accesses = [a for a in memory.accesses if not (first <= a.first and a.last <= last)]
            memory.accesses.append(Access(first, last, writes, number, tick, name))

    def _see_what_was_freed(self) -> None:
        for key, memory in list(self._memory.items()):
            if not memory.alive.expired():
                continue
            del self._memory[key]
            # it is not given away before what the streams that it was recorded on have now
            behind = [self.streams[number].clock for number in memory.kept]
            left = [a for a in memory.accesses if a.stream not in (memory.home, _HOST)]
            left = [a for a in left if all(clock.get(a.stream, 0) < a.tick for clock in behind)]
            if not memory.of_host:  # pinned memory waits for its copies by itself
                self._freed.setdefault(memory.home, []).extend(left)

    def _reuse(self, stream: SimulatedStream, what: str) -> None:
        """New memory, which may be any that was freed on this stream."""
        for a in self._freed.pop(stream.number, []):
            if max(stream.clock.get(a.stream, 0), self.host.get(a.stream, 0)) < a.tick:
                raise StreamRace(
                    f"memory that {a.what} used on {self._name(a.stream)} was freed, and {what} at {_place()} may be "
                    f"given it on {stream.name}, which is not behind that: call record_stream"
                )

    def _of(self, tensor: Tensor) -> SimulatedMemory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._memory[key] = SimulatedMemory(alive, self.current().number)
        return self._memory[key]

    def _name(self, number: int) -> str:
        return "the host" if number == _HOST else self.streams[number].name


def merge(clock: Clock, other: Clock) -> None:
    """The first one comes behind the other, too."""
    for number, tick in other.items():
        if clock.get(number, 0) < tick:
            clock[number] = tick


def covers(clock: Clock, other: Clock) -> bool:
    """Whether the first one is behind the other."""
    return all(clock.get(number, 0) >= tick for number, tick in other.items())


def extent(tensor: Tensor) -> tuple[int, int]:
    """Bytes of its storage that a tensor with values spans: the first, and the one behind the last."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first, first + (reach + 1) * tensor.element_size()


def _place() -> str:
    """File and line of commlib's, or of whoever called, that asked for what is done."""
    frame: FrameType | None = sys._getframe(1)
    other = "?"
    while frame is not None:  # not by traceback: it looks for each file, and this is called for each operator
        name = frame.f_code.co_filename
        if "/torch/" not in name and name != __file__:
            here = f"{name.rpartition('/')[2]}:{frame.f_lineno}"
            if "/commlib/" in name or "/transports/" in name:
                return here
            other = here if other == "?" else other
        frame = frame.f_back
    return other


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operators, and what they read and write."""

    def __init__(self, by: SimulatedAccelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by = by

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "aten::_local_scalar_dense":
            self._by.host_reads(args[0], "Tensor.item")
            return func(*args, **kwargs)
        self._by.finish(self._by.current().clock)
        result = func(*args, **kwargs)
        reads, writes = [], []
        schema = func._schema
        for i, argument in enumerate(schema.arguments):
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written:
                writes += tensors
            elif argument.alias_info is None:
                reads += tensors  # else it is a view of this one that is returned
        known = {t.untyped_storage()._cdata for t in (*reads, *writes) if t.layout == torch.strided}
        fresh = [
            t for out, made in zip(schema.returns, _each(result, len(schema.returns)), strict=True)
            if out.alias_info is None
            for t in tree_leaves(made)
            if isinstance(t, Tensor)
        ]  # fmt: skip
        fresh = [t for t in fresh if t.layout == torch.strided and t.untyped_storage()._cdata not in known]
        writes += fresh
        reads, writes = ([t for t in some if t.layout == torch.strided] for some in (reads, writes))
        waits = func._schema.name == "aten::copy_" and not (kwargs.get("non_blocking") or (args[2:] or [False])[0])
        self._by.ran(reads, writes, str(func), waits=waits, allocates=bool(fresh))
        return result


def _each(result: Any, count: int) -> Sequence[Any]:
    return (result,) if count == 1 else tuple(result) if count else ()
