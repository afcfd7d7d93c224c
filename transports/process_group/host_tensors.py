"""Tensors as a call's schedule reads and fills them: contiguous, one-dimensional, in the host's memory.

One that is that already is used as it is. Of others there is a copy: its values are good after :meth:`Flat.ready`, and
what was filled is where it belongs after :meth:`Flat.back`; both are for the thread that carries out the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .staging import Staged


class Held(Protocol):
    """What a call reads and fills."""

    staged: Sequence[Staged]

    def ready(self) -> None:
        """The values can be read from now on."""

    def back(self) -> None:
        """Brings what was filled to where it belongs."""


class Flat:
    """One tensor.

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
        if tensor.is_cuda:
            self.staged = [Staged(tensor, read=read)]
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


class Joined:
    """Several of one dtype, as one behind the other.

    Args:
        flats: of which the values are wanted.
    """

    def __init__(self, flats: Sequence[Flat]) -> None:
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

    def _parts(self) -> list[tuple[Flat, Tensor]]:
        lengths = [len(f.values) for f in self._flats]
        return list(zip(self._flats, torch.split(self.values, lengths), strict=True))


class Sparse:
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


def flats(tensors: Sequence[Tensor], *, read: bool = True) -> list[Flat]:
    """Each of them."""
    return [Flat(t, read=read) for t in tensors]


def joined(tensors: Sequence[Tensor]) -> Flat | Joined:
    """All of them as one; (Σ n,).

    Raises:
        ValueError: they are not of one dtype.
    """
    held = flats(tensors)
    if len({f.values.dtype for f in held}) != 1:
        raise ValueError(f"one call takes tensors of one dtype, got {sorted({str(t.dtype) for t in tensors})}")
    return held[0] if len(held) == 1 else Joined(held)
