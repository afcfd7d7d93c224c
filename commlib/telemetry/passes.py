"""When a model's passes begin and end, for a trace: by hooks that are there only while one is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from commlib.runtime.autograd import at_end_of_backward
from commlib.telemetry.trace import Trace

TRACK = "training"
"""What the thread that trains does."""


class Passes:
    """Of one model, until :meth:`remove`.

    A backward pass begins when it comes to the model's outputs (whatever these are made of, as long as ``torch`` finds
    the tensors in them), and ends when all gradients are there; what is exchanged may take longer.

    Args:
        module: the model.
        trace: where they are recorded.
    """

    def __init__(self, module: nn.Module, trace: Trace) -> None:
        self._trace = trace
        self._forward: float | None = None
        self._backward: float | None = None
        self._handles = [
            module.register_forward_pre_hook(_Hook(self._begin), prepend=True),  # what other hooks do is of the pass
            module.register_forward_hook(_Hook(self._end)),
        ]

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, *_: Any) -> None:
        self._forward, self._backward = self._trace.now(), None  # a pass that broke off is none

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._forward is not None:
            self._trace.span(TRACK, "forward", self._forward, self._trace.now())
        self._forward = None
        for output in tree_leaves(outputs) if torch.is_grad_enabled() else ():
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(self._begin_backward)

    def _begin_backward(self, _: Any) -> None:
        if self._backward is None and at_end_of_backward(self._end_backward):
            self._backward = self._trace.now()

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._trace.span(TRACK, "backward", self._backward, self._trace.now())
        self._backward = None


class _Hook:
    """A hook of a module; copying the model copies it without what it tells."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def __call__(self, *seen: Any) -> None:
        self._tell(*seen)

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass
