"""Tensors as a call's schedule reads and fills them: contiguous, one-dimensional, in the host's memory.

One that is that already is used as it is. Of others there is a copy: its values are good after
:meth:`HostTensor.ready`, and what was filled is where it belongs after :meth:`HostTensor.back`; both are for the thread
that carries out the call.

A GPU's tensor in the host's pinned memory, for as long as a call lasts, without a halt of what the GPU computes.

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
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from commlib.runtime.streams import Accelerator, accelerator


@functools.cache
def _streams(by: Accelerator, device: torch.device) -> tuple[Any, Any]:
    return by.stream(device), by.stream(device)


class Staged:
    """Tensor of one call, in the host's memory.

    Args:
        by: the accelerator of its device; kept.
        tensor: in a device's memory, any shape and strides.
        read: its values are wanted; else only room for new ones.
    """

    def __init__(self, by: Accelerator, tensor: Tensor, *, read: bool) -> None:
        self.by, self._tensor, self._read = by, tensor, read
        self._out, self._back = _streams(by, tensor.device)
        self._begun, self._there, self._filled = (by.event() for _ in range(3))
        self._begun.record(by.current(tensor.device))
        self.host = by.pinned((tensor.numel(),), tensor.dtype)
        if read:
            with by.use(self._out):
                self._out.wait_event(self._begun)
                whole = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
                self.host.copy_(whole, non_blocking=True)
                self._there.record(self._out)
            by.keep(tensor, self._out)

    @property
    def device(self) -> torch.device:
        """Device of the tensor."""
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
        self.by.keep(self._tensor, self._back)

    def join(self) -> None:
        """Order this thread's stream, from now on, after that copy."""
        self.by.current(self._tensor.device).wait_event(self._filled)

    def after(self) -> Any:
        """A context: what is given to the current stream comes after that copy."""
        return self.by.use(self._back)


class HostTensors(Protocol):
    """Tensors that a call reads and fills."""

    staged: Sequence[Staged]

    def ready(self) -> None:
        """The values can be read from now on."""

    def back(self) -> None:
        """Brings what was filled to where it belongs."""


class HostTensor:
    """Dense tensor of one call.

    Args:
        tensor: any shape and strides.
        read: its values are wanted; else only room for new ones.

    Raises:
        ValueError: it is sparse, or quantised, or on a device that is neither the CPU nor CUDA's.
    """

    def __init__(self, tensor: Tensor, *, read: bool = True) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"the zmq backend carries dense tensors, got one of layout {tensor.layout}")
        self._tensor = tensor = tensor.detach()
        self.staged: Sequence[Staged] = ()
        self._itself = False
        by = accelerator(tensor.device)
        if by is not None and by.has(tensor):
            self.staged = [Staged(by, tensor, read=read)]
            self.values = self.staged[0].host
        elif tensor.device.type != "cpu":
            raise ValueError(f"the zmq backend carries tensors of the CPU and of CUDA devices, got {tensor.device}")
        elif tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            self._itself, self.values = True, tensor.view(-1)
        elif read:
            self.values = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
        else:
            self.values = torch.empty(tensor.numel(), dtype=tensor.dtype)

    def ready(self) -> None:
        """The values can be read from now on."""
        for each in self.staged:
            each.ready()

    def back(self) -> None:
        """Brings what was filled to where it belongs."""
        for each in self.staged:
            each.back()
        if not self.staged and not self._itself:
            self._tensor.copy_(self.values.view(self._tensor.shape))


class JoinedHostTensor:
    """Several of one dtype, as one behind the other.

    Args:
        flats: of which the values are wanted.
    """

    def __init__(self, flats: Sequence[HostTensor]) -> None:
        self._flats = flats
        self.staged: Sequence[Staged] = [s for f in flats for s in f.staged]
        self.values = torch.empty(sum(len(f.values) for f in flats), dtype=flats[0].values.dtype)

    def ready(self) -> None:
        """The values can be read from now on."""
        for flat, part in self._parts():
            flat.ready()
            part.copy_(flat.values)

    def back(self) -> None:
        """Brings what was filled to where it belongs."""
        for flat, part in self._parts():
            flat.values.copy_(part)
            flat.back()

    def _parts(self) -> list[tuple[HostTensor, Tensor]]:
        lengths = [len(f.values) for f in self._flats]
        return list(zip(self._flats, torch.split(self.values, lengths), strict=True))


class SparseHostTensor:
    """A sparse tensor, COO: its indices and values are sent, each (nnz, …), and it is filled with another.

    Args:
        tensor: on the CPU.

    Raises:
        ValueError: it is on another device.
    """

    staged: Sequence[Staged] = ()

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise ValueError(f"the zmq backend carries sparse tensors of the CPU, got one on {tensor.device}")
        self._tensor = tensor  # not detached: that is another one, whose new indices this one never sees
        self.own, self.filled = tensor.detach().coalesce(), list[Tensor]()

    def ready(self) -> None:
        """The values can be read from now on."""

    def back(self) -> None:
        """Brings what was filled to where it belongs."""
        with torch.no_grad():
            self._tensor.copy_(self.filled[0])


def flats(tensors: Sequence[Tensor], *, read: bool = True) -> list[HostTensor]:
    """Each of them."""
    return [HostTensor(t, read=read) for t in tensors]


def joined(tensors: Sequence[Tensor]) -> HostTensor | JoinedHostTensor:
    """All of them as one; (Σ n,).

    Raises:
        ValueError: they are not of one dtype.
    """
    held = flats(tensors)
    if len({f.values.dtype for f in held}) != 1:
        raise ValueError(f"one call takes tensors of one dtype, got {sorted({str(t.dtype) for t in tensors})}")
    return held[0] if len(held) == 1 else JoinedHostTensor(held)
