"""A GPU's tensor in the host's pinned memory, for as long as a call lasts, without a halt of what the GPU computes.

::

    caller's stream  ─ makes the values ─┬─ goes on ──────────────────────────┬─ Work.wait: what comes then
    stream "out"                         └─ copy to the host ─┐               │
    the call's thread                                         └─ schedule ─┐  │
    stream "back"                                                          └─ copy to the GPU

Ordering: "out" starts behind all that the caller's stream had when the call was made, and the call's thread waits for
it before it reads. "back" starts behind the same point, so nothing is overwritten that is still read; and it is asked
for once all is received. Whoever waits for the work, or for its future, has its own stream wait for "back", not the
host. Each device has one of both, as a copy takes all of its line, and neither ever waits for the other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Staged:
    """One tensor of one call.

    Args:
        tensor: on a CUDA device, any shape and strides.
        read: its values are wanted; else only room for new ones.
    """

    def __init__(self, tensor: Tensor, *, read: bool) -> None:
        self._tensor, self._read = tensor, read
        self._out, self._back = _streams(tensor.device)
        self._begun, self._there, self._filled = (torch.cuda.Event() for _ in range(3))  # type: ignore[no-untyped-call]
        self._begun.record(torch.cuda.current_stream(tensor.device))
        self.host = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        if read:
            with torch.cuda.stream(self._out):
                self._out.wait_event(self._begun)
                whole = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
                self.host.copy_(whole, non_blocking=True)
                self._there.record(self._out)
            tensor.record_stream(self._out)

    @property
    def device(self) -> torch.device:
        """Its."""
        return self._tensor.device

    def ready(self) -> None:
        """Waits, on the host, until the values are in its memory."""
        if self._read:
            self._there.synchronize()

    def back(self) -> None:
        """Asks for the copy to the tensor."""
        with self.after():
            self._back.wait_event(self._begun)
            self._tensor.copy_(self.host.view(self._tensor.shape), non_blocking=True)
            self._filled.record(self._back)
        self._tensor.record_stream(self._back)

    def join(self) -> None:
        """What this thread's stream is given from now on comes after that copy."""
        torch.cuda.current_stream(self._tensor.device).wait_event(self._filled)

    def after(self) -> Any:
        """A context: what is given to the current stream comes after that copy."""
        return torch.cuda.stream(self._back)
