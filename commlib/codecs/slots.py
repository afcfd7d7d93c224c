"""Memory of one codec between steps, declared (:class:`Slot`) and handed in (:class:`Memory`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from commlib.codecs import residuals
from commlib.runtime import scratch
from commlib.runtime.layers import LayerSpec

OWNER = "owner."
"""Prefix of the slots of a stripe's owner: they are in units of the mean over all ranks."""
NODE = "node."
"""Prefix of the slots for this rank's stripe of a layer under a hierarchy: in units of the mean over its node."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """Tensor that a codec keeps for one layer between steps.

    Args:
        shape: its shape.
        role: what it means when the loss scale or the world size changes.
            ``"pending"`` — gradient not sent yet: follows the loss scale, and the mean over ranks
            is conserved when ranks come or go. ``"local"`` — in gradient units too, but not owed to
            anyone (a momentum): treated alike. ``"replicated"`` — the same on every rank and without
            a unit (a basis).
        init: ``"zeros"``, or ``"normal"`` — standard normal, seeded by the layer and equal on all ranks.
        dtype: float32, or bfloat16 or int8 (:mod:`commlib.codecs.residuals`).
    """

    shape: tuple[int, ...]
    role: Literal["pending", "local", "replicated"] = "pending"
    init: Literal["zeros", "normal"] = "zeros"
    dtype: torch.dtype = torch.float32

    @property
    def room(self) -> tuple[int, ...]:
        """Shape of the tensor that holds it."""
        return residuals.room(self.shape, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor that holds it."""
        return math.prod(self.room) * self.dtype.itemsize


class Carry(NamedTuple):
    """Error feedback in a codec's own pass: x + ``old`` is encoded, and ``new`` is left with what was not sent of it.

    Float32, contiguous, of x's shape; the two may be one tensor. Or both in a shorter format, and then ``up`` rounds
    what is left (:mod:`commlib.codecs.residuals`): only a codec that ``carries`` it is handed such ones.
    """

    old: Tensor
    new: Tensor
    up: int = 0

    @property
    def short(self) -> bool:
        """Whether they are of a shorter format than float32."""
        return self.new.dtype != torch.float32


class HasSlots(Protocol):
    """A codec, as far as its memory goes."""

    def slots(self, spec: LayerSpec) -> dict[str, Slot]:
        """Name → slot for a layer."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """The slots of one layer during one step: ``old`` is read, ``new`` is written.

    They are two tensors, so that a step that turns out to be non-finite can be forgotten by not
    swapping them. A caller who does not need that may pass the same tensors twice: codecs must
    work in place as well.

    Attributes:
        old: slots, by name, as the last step that counted left them.
        new: the same slots as this step leaves them.
        up: how residuals of a shorter format are rounded in this step (:func:`commlib.codecs.residuals.bar`).
    """

    old: Mapping[str, Tensor]
    new: Mapping[str, Tensor]
    up: int = residuals.bar(0)

    @classmethod
    def zeros(cls, codec: HasSlots, spec: LayerSpec) -> Memory:
        """Fresh in-place memory for use outside a training loop (``old is new``)."""
        slots = {k: init_slot(s, spec, seed=0) for k, s in codec.slots(spec).items()}
        return cls(slots, slots)

    def rows(self, start: int, stop: int) -> Memory:
        """The part of every slot that belongs to rows ``start:stop`` of dimension 0."""
        return Memory(
            {k: v[start:stop] for k, v in self.old.items()},
            {k: v[start:stop] for k, v in self.new.items()},
            self.up,
        )

    def flat(self) -> Memory:
        """Every slot in one dimension, the same memory."""
        return Memory(
            {k: v.view(-1) for k, v in self.old.items()}, {k: v.view(-1) for k, v in self.new.items()}, self.up
        )


def init_slot(slot: Slot, spec: LayerSpec, *, seed: int) -> Tensor:
    """A slot's first value, on the layer's device."""
    if slot.init == "zeros":
        return scratch.zeros(slot.room, slot.dtype, spec.device)
    gen = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers on every kind of device
    return torch.randn(slot.shape, generator=gen, dtype=torch.float32).to(spec.device, slot.dtype)
