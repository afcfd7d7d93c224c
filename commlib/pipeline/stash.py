"""A module's forward pass with the weights of now, whatever becomes of them before its backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def stashed(module: nn.Module, *inputs: Any) -> Any:
    """``module(*inputs)``, whose backward pass may come after later updates of the parameters in place.

    It computes with copies of the parameters (HetPipe, USENIX ATC 2020, section 4: each minibatch has its own), which
    autograd keeps as long as it needs them; gradients go through the copies to the parameters, added to ``.grad`` as
    always. Buffers are the module's own.
    """
    copies: dict[str, Tensor] = {name: p.clone() for name, p in module.named_parameters() if p.requires_grad}
    return functional_call(module, copies, inputs)


def output_of(stage: str, found: Any) -> Tensor:
    """What a stage has made, if it can be trained.

    Raises:
        TypeError: not one tensor.
        ValueError: it needs no gradient.
    """
    if not isinstance(found, Tensor):
        raise TypeError(f"{stage} makes {type(found).__name__}: between stages, and as a loss, goes one tensor")
    if not (found.requires_grad and torch.is_grad_enabled()):
        raise ValueError(f"what {stage} makes needs no gradient: train it with gradients, and a parameter that has one")
    return found
