"""The end of a backward pass, and waiting there."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commlib.runtime.untraced import untraced


def at_end_of_backward(call: Callable[[], None]) -> bool:
    """Whether there is a backward pass, at whose end it is called. (A rank that has joined shadows the others'.)"""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(untraced(_run), call))
    except RuntimeError:
        return False
    return True


def wait(future: torch.futures.Future[Tensor], meanwhile: Callable[[], None], every: float = 1.0) -> None:
    """Until it is done, raising its error; calls ``meanwhile`` every so many seconds."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()  # C throughout: the backend's thread runs no Python for it
    future.add_done_callback(done.put)
    while True:
        try:
            done.get(timeout=every)
            break
        except queue.Empty:  # a slow link, or a rank that is gone
            meanwhile()
    future.wait()


def _run(call: Callable[[], None]) -> None:
    call()
