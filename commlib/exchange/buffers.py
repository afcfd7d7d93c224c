"""Buffers of an exchange while it runs: made in a first step, the same again in every later one.

What the system gives anew costs a page fault for every 4 kB, more than most codecs do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from commlib.groups.world import World
from commlib.runtime import scratch

T = TypeVar("T")


class StepBuffers:
    """The tensors that one exchange asks for, in the order in which it does: the same in every step.

    Where it does not, as after a change of plan, the tensor is made anew.
    """

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._next = 0
        self._known: tuple[object, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self._made)

    def rewind(self) -> None:
        """A new step: what follows is answered with what was made for the last one. Nobody may need that any more."""
        del self._made[self._next :]
        self._next = 0

    def known(self, key: object, make: Callable[[], T]) -> T:
        """Value made for an equal key in the last step, or made now: one thing, as a layout."""
        if self._known is None or self._known[0] != key:
            self._known = key, make()
        found: T = self._known[1]
        return found

    def bytes(self, n: int, device: torch.device) -> Tensor:
        """Shape (n,), uint8, of zeros when it is made: padding is sent, too, and nothing else may be in it."""
        found = self._take((n,), torch.uint8, device)
        return self._put(scratch.zeros((n,), torch.uint8, device)) if found is None else found

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Tensor of any content."""
        found = self._take(shape, dtype, device)
        return self._put(scratch.zeros(shape, dtype, device)) if found is None else found

    def gathered(self, n: int, world: World, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room of an all-gather of n bytes a rank, (P·n,), and this rank's part of it, (n,): it is sent from there."""
        found = self.bytes(world.size * n, device)
        return found, own_row(found, world)

    def _take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if self._next < len(self._made):
            tensor = self._made[self._next]
            if tensor.shape == tuple(shape) and tensor.dtype == dtype and tensor.device == device:
                self._next += 1
                return tensor
        return None

    def _put(self, tensor: Tensor) -> Tensor:
        self._made[self._next : self._next + 1] = [tensor]
        self._next += 1
        return tensor


class SpareBuffers:
    """Buffers of exchanges that are not under way, by what they are of; those of none of the last steps are freed.

    So what was sorted otherwise, by another plan or in DDP's first buckets, leaves none behind.
    """

    _STEPS = 2  # a step that is sorted otherwise, once, costs the next one nothing

    def __init__(self) -> None:
        self._spare: dict[Hashable, tuple[StepBuffers, int]] = {}
        self._step = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all that is not lent."""
        return sum(arena.nbytes for arena, _ in list(self._spare.values()))

    def lend(self, key: Hashable, step: int) -> StepBuffers:
        """Buffers of this exchange, rewound: those of its last time if they are there.

        Args:
            key: what the exchange is of.
            step: count of steps.
        """
        if step != self._step:
            self._step = step
            for each, (_, last) in list(self._spare.items()):
                if not step - self._STEPS <= last <= step:
                    del self._spare[each]
        arena, _ = self._spare.pop(key, (StepBuffers(), step))
        arena.rewind()
        return arena

    def take_back(self, key: Hashable, arena: StepBuffers, step: int) -> None:
        """Keep the buffers of an exchange that is through. Arguments as :meth:`lend`."""
        self._spare[key] = arena, step


ALIGN = 8
"""Bytes at a multiple of which every payload starts: codecs view parts of it as float32."""


class Packing:
    """Several payloads in one buffer, each at an aligned offset.

    Args:
        lengths: bytes of each payload.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.offsets: list[int] = []
        end = 0
        for n in self.lengths:
            self.offsets.append(end)
            end += -(-n // ALIGN) * ALIGN
        self.total = end

    def slices(self, buffer: Tensor) -> list[Tensor]:
        """The payloads as views of a buffer of ``total`` bytes."""
        return [buffer[o : o + n] for o, n in zip(self.offsets, self.lengths, strict=True)]

    def columns(self, buffer: Tensor, count: int) -> list[Tensor]:
        """Payloads of all ranks, shape (count, length) for each, as views of ``count`` such buffers in a row."""
        # rows of no bytes would begin anywhere
        whole = buffer.view(count, self.total) if self.total else buffer.new_empty(count, ALIGN)
        return [whole[:, o : o + n] for o, n in zip(self.offsets, self.lengths, strict=True)]


def own_row(buffer: Tensor, world: World) -> Tensor:
    """This rank's part of a flat buffer in which every rank has an equal one."""
    return rows(buffer, world.size)[world.rank]


def rows(buffer: Tensor, count: int) -> list[Tensor]:
    """A flat buffer in ``count`` equal parts. (Not ``view(count, -1)``: rows of no bytes would be misaligned.)"""
    n = len(buffer) // count
    return [buffer[i * n : (i + 1) * n] for i in range(count)]
