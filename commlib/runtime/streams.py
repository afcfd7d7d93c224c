"""Side streams for copies, and values read back from a device without stalling it; on the CPU all is done at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StreamEvent:
    """A moment in a stream's work; on the CPU it is past."""

    def __init__(self, event: Any = None, device: torch.device | None = None) -> None:
        self._event, self._device = event, device

    def hold(self) -> None:
        """Make the current stream wait for it, with all that it is given from now on; this thread does not wait."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """This thread waits for it; nobody calls that in the thread that trains."""
        if self._event is not None:
            self._event.synchronize()


class CopyStream:
    """Side CUDA stream for copies in one direction; synchronous on the CPU.

    Args:
        device: of the tensors that are not in the host's memory.
    """

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.cuda.Stream
        self._stream: Any = stream(device) if device.type == "cuda" else None
        self._device = device

    def now(self) -> StreamEvent:
        """All that the current stream has been given so far."""
        if self._stream is None:
            return StreamEvent()
        return StreamEvent(torch.cuda.current_stream(self._device).record_event(), self._device)

    def copy(self, into: Tensor, source: Tensor, *after: StreamEvent) -> StreamEvent:
        """Copies behind these marks, and what was copied here before; when it is done.

        One of the tensors is in the host's memory, and pinned (:func:`host`). PyTorch's allocators give the memory of
        either to nobody else before.
        """
        if self._stream is None:
            into.copy_(source)
            return StreamEvent()
        with torch.cuda.stream(self._stream):
            for mark in after:
                mark.hold()
            into.copy_(source, non_blocking=True)  # marks the pinned one as in use by this stream
            (into if into.is_cuda else source).record_stream(self._stream)
            return StreamEvent(self._stream.record_event(), self._device)


def host(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(n,) of the host's memory, pinned if there is a device to copy to: of PyTorch's pool of such memory, to which it
    goes back when nobody has it any more, so after some iterations none is pinned anew.
    """
    return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda")


class Readback:
    """Copies small tensors of one shape to the host, one at a time; :meth:`get` waits for that copy only.

    On CUDA the copy goes to pinned memory behind the work already on the current stream. Asked for a
    step later, as commlib does, it is there: the host then still runs a whole forward pass ahead.
    """

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._event: Any = None

    def start(self, value: Tensor) -> None:
        """Begin with the copy of another one, which on the CPU is no copy: it is read when it is asked for."""
        if value.device.type != "cuda":
            self._host = value
            return
        if self._host is None or self._event is None or self._host.dtype != value.dtype:
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._host.copy_(value, non_blocking=True)
        self._event.record()

    def get(self) -> list[float]:
        """Values that were copied last; none if nothing was ever copied."""
        if self._event is not None:
            self._event.synchronize()
        return [] if self._host is None else self._host.view(-1).tolist()
