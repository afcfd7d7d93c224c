"""Streams of a device, and values read back from it without stalling it; on the CPU all is done at once.

All that commlib asks of streams and events goes through here: of CUDA's, or of a simulated accelerator's
(:mod:`commlib.testing.accelerator`), to which the CPU's tensors are a device's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Accelerator(Protocol):
    """Contract of a kind of device that does its work in streams. Streams and events are as ``torch.cuda`` has them."""

    def __hash__(self) -> int: ...

    def stream(self, device: torch.device) -> Any:
        """A new stream of it."""

    def current(self, device: torch.device) -> Any:
        """The stream to which this thread gives what it asks of the device."""

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which a stream is the current one of its device."""

    def event(self, *, timing: bool = False) -> Any:
        """A new event, not recorded yet."""

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Give the tensor's memory to nobody before what the stream has been given so far is done."""

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device copies to and from by itself, uninitialised."""

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor is in a device's memory."""

    def wait(self, device: torch.device) -> None:
        """This thread waits for all that the device has been given."""

    def future(self, *devices: torch.device) -> torch.futures.Future[Any]:
        """A future whose value is ready once the streams current at :meth:`complete` have come so far."""

    def complete(self, future: torch.futures.Future[Any], value: object) -> None:
        """Set the value of such a future; no thread waits for it."""

    def joined(self, future: torch.futures.Future[Any]) -> None:
        """The future is done, and this thread has waited for it: order its stream behind the value."""


class _Cuda:
    """Accelerator of ``torch.cuda``."""

    def stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        used: contextlib.AbstractContextManager[Any] = torch.cuda.stream(stream)
        return used

    def event(self, *, timing: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]

    def keep(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def has(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def wait(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def future(self, *devices: torch.device) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=list(devices))

    def complete(self, future: torch.futures.Future[Any], value: object) -> None:
        future.set_result(value)

    def joined(self, future: torch.futures.Future[Any]) -> None:
        """Same contract; PyTorch's futures do this by themselves."""


_CUDA = _Cuda()
_of_the_cpu: list[Accelerator] = []


def accelerator(device: torch.device) -> Accelerator | None:
    """Accelerator of a device; None where a call returns when its work is done."""
    if device.type == "cuda":
        return _CUDA
    return _of_the_cpu[-1] if _of_the_cpu and device.type == "cpu" else None


@contextlib.contextmanager
def simulated(by: Accelerator) -> Iterator[None]:
    """A context in which the CPU's tensors are those of this accelerator, in all threads."""
    _of_the_cpu.append(by)
    try:
        yield
    finally:
        _of_the_cpu.remove(by)


def future(device: torch.device) -> torch.futures.Future[Any]:
    """A future of a value on a device, to be set by :func:`complete`."""
    by = accelerator(device)
    return torch.futures.Future() if by is None else by.future(device)


def complete(done: torch.futures.Future[Any], value: Any, device: torch.device) -> None:
    """Set the value of a :func:`future`; on a device it is ready once the current stream has come so far."""
    by = accelerator(device)
    if by is None:
        done.set_result(value)
    else:
        by.complete(done, value)


def joined(done: torch.futures.Future[Any]) -> None:
    """A :func:`future` is done, and waited for: order this thread's stream behind its value."""
    for by in (_CUDA, *_of_the_cpu):
        by.joined(done)


@dataclasses.dataclass(frozen=True)
class Moment:
    """Moment in the work of a device's stream, read without waiting: asked about when it is past.

    Args:
        host_s: when it was noted, :func:`time.perf_counter`; in a thread's order.
        event: behind what the stream had been given until then; None on the CPU, which had done it.
    """

    host_s: float
    event: Any = None

    def since(self, before: Moment) -> float:
        """Seconds from another moment of the same device to this one; waits until both are past."""
        if self.event is None or before.event is None:
            return self.host_s - before.host_s
        before.event.synchronize()
        self.event.synchronize()
        return float(before.event.elapsed_time(self.event)) / 1e3


def moment(device: torch.device) -> Moment:
    """This moment of the current stream."""
    by = accelerator(device)
    event = None if by is None else by.event(timing=True)
    if by is not None and event is not None:
        event.record(by.current(device))
    return Moment(time.perf_counter(), event)


def when_done(device: torch.device) -> float:
    """When the device has done all that it was given, for which this thread waits: :func:`time.perf_counter`."""
    if (by := accelerator(device)) is not None:
        by.wait(device)
    return time.perf_counter()


class StreamEvent:
    """A moment in a stream's work; on the CPU it is past."""

    def __init__(self, event: Any = None, device: torch.device | None = None) -> None:
        self._event, self._device = event, device

    def hold(self) -> None:
        """Make the current stream wait for it, with all that it is given from now on; this thread does not wait."""
        if self._event is not None and self._device is not None and (by := accelerator(self._device)) is not None:
            by.current(self._device).wait_event(self._event)

    def wait(self) -> None:
        """This thread waits for it; nobody calls that in the thread that trains."""
        if self._event is not None:
            self._event.synchronize()


def now(device: torch.device) -> StreamEvent:
    """All that the current stream of a device has been given so far."""
    by = accelerator(device)
    return StreamEvent() if by is None else StreamEvent(by.current(device).record_event(), device)


class CopyStream:
    """Side stream for copies in one direction; synchronous on the CPU.

    Args:
        device: of the tensors that are not in the host's memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._by, self._device = accelerator(device), device
        self._stream = None if self._by is None else self._by.stream(device)

    def now(self) -> StreamEvent:
        """As :func:`now`, of its device."""
        return now(self._device)

    def copy(self, into: Tensor, source: Tensor, *after: StreamEvent) -> StreamEvent:
        """Copies behind these marks, and what was copied here before; when it is done.

        One of the tensors is in the host's memory, and pinned (:func:`host`). PyTorch's allocators give the memory of
        either to nobody else before.
        """
        if self._by is None:
            into.copy_(source)
            return StreamEvent()
        with self._by.use(self._stream):
            for mark in after:
                mark.hold()
            into.copy_(source, non_blocking=True)  # marks the pinned one as in use by this stream
            self._by.keep(into if self._by.has(into) else source, self._stream)
            return StreamEvent(self._by.current(self._device).record_event(), self._device)


def host(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n,) of the host's memory, pinned if there is a device to copy to: of PyTorch's pool of such memory, to which it
    goes back when nobody has it any more, so after some iterations none is pinned anew.
    """
    by = accelerator(device)
    return torch.empty(numel, dtype=dtype) if by is None else by.pinned((numel,), dtype)


class Readback:
    """Copies small tensors of one shape to the host, one at a time; :meth:`get` waits for that copy only.

    On a device the copy goes to pinned memory behind the work already on the current stream. Asked for a
    step later, as commlib does, it is there: the host then still runs a whole forward pass ahead.
    """

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._event: Any = None

    def start(self, value: Tensor) -> None:
        """Begin with the copy of another one, which on the CPU is no copy: it is read when it is asked for."""
        by = accelerator(value.device)
        if by is None:
            self._host = value
            return
        if self._host is None or self._event is None or self._host.dtype != value.dtype:
            self._host, self._event = by.pinned(value.shape, value.dtype), by.event()
        self._host.copy_(value, non_blocking=True)
        self._event.record()

    def get(self) -> list[float]:
        """Values that were copied last; none if nothing was ever copied."""
        if self._event is not None:
            self._event.synchronize()
        return [] if self._host is None else self._host.view(-1).tolist()
