"""The one communication hook of a DDP model: a slot that a state is attached to, and taken from again.

PyTorch registers one hook for a DDP model's lifetime, and never takes it away again. So what is registered is thin: it
hands a bucket to the state that is attached now, or, if none is, does what DDP does by itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from commlib.ddp.compat import CopiedState, check_ddp, nobody
from commlib.runtime.autograd import untraced


class Attachable(Protocol):
    """A state that can be attached."""

    def exchange(self, bucket: Any, /) -> torch.futures.Future[Tensor]:
        """Exchanges one bucket of DDP's."""

    def before_join(self) -> None:
        """The model comes into a ``Join``: ranks will drop out one by one."""


class HookSlot:
    """The hook's state as DDP sees it, or what that leads to.

    Args:
        group: process group that DDP's own exchange goes over.
        attached: who exchanges now.

    Attributes:
        attached: who exchanges now; None: DDP's own exchange. To be changed between two steps, on all ranks.
    """

    def __init__(self, group: Any, attached: Attachable | None) -> None:
        self._group, self.attached = group, attached
        self.untraced = untraced(HookSlot.reduce)

    def __reduce__(self) -> tuple[Callable[[], CopiedState], tuple[()]]:
        """A copy of the model, or a pickle, is plain."""
        return nobody, ()

    @property
    def slot(self) -> HookSlot:
        """This slot itself: whatever state a hook has, its ``slot`` leads here."""
        return self

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Exchanges one bucket; DDP calls this (through :func:`commlib.hook`) in bucket order on every rank."""
        return mean(bucket, self._group) if self.attached is None else self.attached.exchange(bucket)


def mean(bucket: Any, group: Any) -> torch.futures.Future[Tensor]:
    """The mean over ranks as DDP makes it without a hook, bit for bit: scaled first, then summed."""
    buffer: Tensor = bucket.buffer()
    if buffer.is_sparse:
        buffer.div_(group.size())  # DDP divides there
    else:
        buffer.mul_(1 / group.size())  # and multiplies here, which rounds differently
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    future: torch.futures.Future[Tensor] = work.get_future().then(_only)
    return future


def _only(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    (value,) = done.value()
    return value


_SLOTS: weakref.WeakKeyDictionary[DistributedDataParallel, HookSlot] = weakref.WeakKeyDictionary()


def slot_of(ddp: DistributedDataParallel) -> HookSlot | None:
    """Slot that a model has, whether its hook was registered by ``attach`` or by the user; None: it has none."""
    for _, state in ddp._comm_hooks:
        found = getattr(state, "slot", None)
        if isinstance(found, HookSlot):
            return found
    return _SLOTS.get(ddp)


def check_free(ddp: Any) -> None:
    """Raises TypeError if it is no DDP model, ValueError if something is attached, or another hook is there."""
    slot = slot_of(ddp) if isinstance(ddp, DistributedDataParallel) else None
    if slot is None:
        check_ddp(ddp)
    elif slot.attached is not None:
        raise ValueError(
            "commlib is attached already to this DDP model: comm.swap(…), of what attach() returned, changes how "
            "gradients travel, and after comm.detach() you can attach() again"
        )


def give(ddp: DistributedDataParallel, slot: HookSlot) -> HookSlot:
    """Give a model its slot: the one it has, or this one."""
    vars(ddp)["join_hook"] = JoinGuard(ddp)
    return _SLOTS.setdefault(ddp, slot_of(ddp) or slot)


class JoinGuard:
    """Guard before a model's ``join_hook``, which every rank calls, even one that has no inputs at all.

    Args:
        ddp: the model; of this object alone.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)

    def __call__(self, **options: Any) -> Any:
        """The model's own join hook.

        Raises:
            ValueError: gradients shall be divided by the ranks that are left, and a state is attached.
        """
        ddp: Any = self._ddp()
        slot = slot_of(ddp)
        if slot is not None and slot.attached is not None:
            if not options.get("divide_by_initial_world_size", True):
                raise ValueError(
                    "Join(divide_by_initial_world_size=False) divides by the ranks that have not finished, and commlib "
                    "by all ranks: leave the option out, or call comm.detach() before"
                )
            slot.attached.before_join()
        return type(ddp).join_hook(ddp, **options)

    def __reduce__(self) -> Any:  # a copy of the model has its own, and a bound method finds the copy
        ddp: Any = self._ddp()
        return functools.partial(type(ddp).join_hook, ddp).__reduce__()
