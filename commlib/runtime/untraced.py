"""What autograd and DDP call in the middle of a step is no code for ``torch.compile``.

A step may be compiled as a whole, backward pass and all. PyTorch leaves the backward pass to autograd, and its compiler
sees the Python that autograd calls there: hooks, callbacks, functions' backward passes. Ours hand tensors to process
groups and threads, and must run as they are written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

import torch

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
