"""The beginning of a DDP model's forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.nn.parallel import DistributedDataParallel

from commlib.runtime.untraced import untraced


class Beginner(Protocol):
    """Who wants to know."""

    def begin(self, syncing: bool, /) -> None:
        """A forward pass begins; ``syncing``: not within ``no_sync``, so its backward pass ends with an exchange."""


def before_forward(ddp: DistributedDataParallel, who: Beginner, *, keep: bool = False) -> Any:
    """Tell somebody of every forward pass of the model.

    Args:
        ddp: the model.
        who: is told.
        keep: whether the model shall keep ``who`` alive.

    Returns:
        What has a ``remove()``.
    """
    return ddp.register_forward_pre_hook(_Before((lambda: who) if keep else weakref.ref(who)))


class _Before:
    """The hook itself; copying the model copies it without what it points at."""

    def __init__(self, who: Callable[[], Beginner | None]) -> None:
        self._who, self._untraced = who, untraced(_tell)

    def __call__(self, ddp: DistributedDataParallel, inputs: Sequence[Any]) -> None:
        self._untraced(self._who, ddp)

    def __reduce__(self) -> Any:
        return _nothing, ()


def _tell(who: Callable[[], Beginner | None], ddp: DistributedDataParallel) -> None:
    if (it := who()) is not None:
        it.begin(bool(ddp.require_backward_grad_sync))


def _nothing() -> Callable[[Any, Any], None]:
    return lambda module, inputs: None
