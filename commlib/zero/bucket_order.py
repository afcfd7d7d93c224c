"""Which buckets may leave: those whose gradients are all there, and those before them.

Ordering: a bucket leaves only behind all those before it, whatever the order in which gradients come. So every rank
asks its process group for the same buckets in the same order, even if a gradient is missing on one of them.

Whether a step counts, said by all ranks and heard alike by all. Pure.

A rank sees the mean gradients of its own part only. So each says whether these are finite, the sum of their squares,
and which parameters had a gradient on it; what follows from all that is the same everywhere.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from commlib.errors import CommlibError
from commlib.runtime.streams import accelerator


class BucketOrder:
    """Order in which the buckets of one step leave, until :meth:`reset`.

    Args:
        buckets: names of parameters.
    """

    def __init__(self, buckets: Sequence[Sequence[str]]) -> None:
        self._all = [frozenset(names) for names in buckets]
        self._of = {name: i for i, names in enumerate(buckets) for name in names}
        self.reset()

    def reset(self) -> None:
        """The next step."""
        self._missing = [set(names) for names in self._all]
        self._next = 0

    def came(self, name: str) -> range:
        """The buckets that may leave now that this gradient is there.

        Raises:
            CommlibError: its bucket has left in this step.
        """
        bucket = self._of[name]
        if bucket < self._next:
            raise CommlibError(
                f"a gradient of {name} came after its bucket had left: after a backward pass comes step(), and all "
                "passes of a step but the last go into no_sync()"
            )
        self._missing[bucket].discard(name)
        first = self._next
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
        return range(first, self._next)

    def rest(self) -> range:
        """Buckets that have not left: the step ends, and what is missing does not come."""
        first, self._next = self._next, len(self._missing)
        return range(first, self._next)


class GradientReceiver(Protocol):
    """Receiver that is told of gradients (:class:`commlib.ShardedStep`)."""

    def arrived(self, name: str) -> None:
        """Take note that a parameter's gradient is there."""


def hook_of(receiver: GradientReceiver, name: str) -> Callable[[Tensor], None]:
    """A hook on a parameter that tells of its gradient, and does not keep the receiver alive."""
    who = weakref.ref(receiver)

    def hook(_: Tensor) -> None:
        alive = who()
        if alive is not None:
            alive.arrived(name)

    return hook


@dataclasses.dataclass(frozen=True)
class StepVerdict:
    """Verdict of all ranks on a step.

    Attributes:
        finite: whether the mean gradients are; if not, it does not count.
        norm: of all of them, the root of the sum of squares.
        used: for every parameter, whether any rank had a gradient of it.
    """

    finite: bool
    norm: float
    used: tuple[bool, ...]


def said(means: Sequence[Tensor], used: Tensor) -> Tensor:
    """Part of one rank in the verdict, (8 + parameters,) uint8; no device is waited for.

    Args:
        means: all gradients of its part.
        used: for every parameter, whether there was a gradient of it, (n,) uint8, on their device.
    """
    return torch.cat([sum_of_squares(means).view(1).view(torch.uint8), used])


def heard(parts: Tensor) -> StepVerdict:
    """Verdict from all ranks' parts, (P, 8 + parameters), added in rank order. Here a device is waited for, once."""
    rows = parts.tolist()
    squares = [struct.unpack("=d", bytes(row[:8]))[0] for row in rows]
    total = sum(squares)
    used = tuple(any(column) for column in zip(*(row[8:] for row in rows), strict=True))
    return StepVerdict(math.isfinite(total), math.sqrt(total) if total >= 0 else math.nan, used)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all values, float64 of no dimension; finite where they are, and below 1e154.

    On the CPU in the values' own precision, which takes half as long, unless that overflows.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    on_device = accelerator(tensors[0].device) is not None
    roots = _norms(tensors, torch.float64 if on_device else None)
    if not on_device and not bool(roots.isfinite().all()):
        roots = _norms(tensors, torch.float64)
    return roots.square().sum()


def _norms(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(x, dtype=dtype).double() for x in tensors])
