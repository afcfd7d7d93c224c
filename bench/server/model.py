"""A network that computes by sleeping: layers whose times and bytes are known."""

from __future__ import annotations

import time
from typing import Any, cast

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """Values that get a gradient of ones.

    Args:
        numel: of its parameter, float32.
        forward_s, backward_s: seconds that it computes.
    """

    def __init__(self, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self._gradient = torch.ones(numel)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        made: Any = _Sleeping.apply(x, self.weight, self._gradient, self.backward_s)  # type: ignore[no-untyped-call]
        return cast(Tensor, made)


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], ctx.gradient, None, None


def network(layers: int, nbytes: int, forward_s: float, backward_s: float) -> nn.Sequential:
    """So many layers alike, with so many bytes and seconds in all."""
    each = nbytes // 4 // layers
    return nn.Sequential(*(Layer(each, forward_s / layers, backward_s / layers) for _ in range(layers)))
