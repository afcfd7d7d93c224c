"""Callbacks at the beginning of a forward pass and at the end of a backward pass, outside of ``torch.compile``.

A step may be compiled as a whole, backward pass and all. PyTorch leaves the backward pass to autograd, and its compiler
sees the Python that autograd calls there: hooks, callbacks, functions' backward passes. Ours hand tensors to process
groups and threads, and must run as they are written: :func:`untraced`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from commlib.runtime.streams import joined

LOOK_S = 0.5
"""Seconds between two looks of a thread that waits: has another rank given up, or does it call the roll?"""

_Call = TypeVar("_Call", bound=Callable[..., object])


@functools.cache
def untraced(call: _Call, reason: str | None = None) -> _Call:
    """The same, never compiled. (This loads torch._dynamo, a second; where there is a DDP model, that has done so.)

    Args:
        call: a function of a module or class. What is bound to an object would keep that alive: bind what comes out.
        reason: told to whom PyTorch reports the graph break.
    """
    disable: Callable[..., _Call] = torch.compiler.disable
    told = "reason" in inspect.signature(disable).parameters  # not so in torch 2.7
    return disable(call, **({"reason": reason} if told else {}))


class ReadyHook:
    """Post-accumulate hook of ours on a parameter: it tells that the gradient is there, and does not look at it.

    Args:
        tell: called without the parameter.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __call__(self, parameter: object) -> None:
        self._tell()


def others_post_accumulate(parameter: Any) -> bool:
    """Whether a parameter has a post-accumulate hook that is none of ours."""
    return any(not isinstance(hook, ReadyHook) for hook in (parameter._post_accumulate_grad_hooks or {}).values())


class ForwardListener(Protocol):
    """Listener that is told when forward passes begin."""

    def begin(self, syncing: bool, /) -> None:
        """A forward pass begins; ``syncing``: not within ``no_sync``, so its backward pass ends with an exchange."""


class ForwardEndListener(Protocol):
    """Listener that is told when forward passes end."""

    def end(self) -> None:
        """A forward pass has ended, perhaps by an error."""


def before_forward(ddp: DistributedDataParallel, who: ForwardListener, *, keep: bool = False) -> Any:
    """Tell somebody of every forward pass of the model.

    Args:
        ddp: the model.
        who: is told.
        keep: whether the model shall keep ``who`` alive.

    Returns:
        What has a ``remove()``.
    """
    return ddp.register_forward_pre_hook(_ForwardHook(_tell_begin, (lambda: who) if keep else weakref.ref(who)))


def after_forward(ddp: DistributedDataParallel, who: ForwardEndListener) -> Any:
    """Tell somebody of the end of every forward pass of the model; returns what has a ``remove()``."""
    return ddp.register_forward_hook(_ForwardHook(_tell_end, weakref.ref(who)), always_call=True)


class _ForwardHook:
    """The hook itself. A copy of the model has Python's ``nullcontext().__exit__`` in its place: it does nothing."""

    def __init__(self, tell: Callable[..., None], who: Callable[[], object]) -> None:
        self._who, self._untraced = who, untraced(tell)

    def __call__(self, ddp: DistributedDataParallel, *_: object) -> None:
        self._untraced(self._who, ddp)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")


def _tell_begin(who: Callable[[], ForwardListener | None], ddp: DistributedDataParallel) -> None:
    if (it := who()) is not None:
        it.begin(bool(ddp.require_backward_grad_sync))


def _tell_end(who: Callable[[], ForwardEndListener | None], ddp: DistributedDataParallel) -> None:
    if (it := who()) is not None:
        it.end()


def at_end_of_backward(call: Callable[[], None]) -> bool:
    """Whether there is a backward pass, at whose end it is called. (A rank that has joined shadows the others'.)"""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(untraced(_run), call))
    except RuntimeError:
        return False
    return True


def wait(future: torch.futures.Future[Tensor], meanwhile: Callable[[], None], every: float = LOOK_S) -> None:
    """Wait until it is done, raising its error; calls ``meanwhile`` every so many seconds."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()  # C throughout: the backend's thread runs no Python for it
    future.add_done_callback(done.put)
    while True:
        try:
            done.get(timeout=every)
            break
        except queue.Empty:  # a slow link, or a rank that is gone
            meanwhile()
    future.wait()
    joined(future)


def _run(call: Callable[[], None]) -> None:
    call()
