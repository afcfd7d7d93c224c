"""An optimizer for sums of a loss and an L1 penalty, which puts weights to exactly 0.

``torch.optim`` has none: its optimizers follow a subgradient of the penalty, and weights that should be 0 stay near it.
Here every value is treated by itself, so a shard may do to a chunk what the optimizer does to the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class ProximalAdagrad(Optimizer):
    """Adagrad for loss + l1·Σ|w|: a step along the loss's gradient, then one towards 0, which ends at 0.

    With G the sum of all squared gradients of a weight and α = lr/√G, its new value is z - sign(z)·α·l1 for
    z = w - α·g, and 0 where |z| ≤ α·l1. Gradients are of the loss alone; what is penalised is never in them. A weight
    whose gradients were all 0 stays as it is.

    Composite mirror descent with diagonal matrices of Duchi, Hazan and Singer, "Adaptive Subgradient Methods" (JMLR
    2011). The penalty counts once in each step: where workers' pushes are steps of their own (any rule but ``bsp``),
    P of them shrink a weight P times, so give it l1/P there.

    Args:
        params: as of any optimizer; dense and real. Groups may have options of their own.
        lr: step of a weight at its first gradient, in units of the weights; above 0.
        l1: λ, 0 or more, in units of the gradients.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, l1: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "l1": l1})
        for group in self.param_groups:
            if not 0 < group["lr"] < math.inf:
                raise ValueError(f"lr must be above 0 and finite, got {group['lr']}")
            if not 0 <= group["l1"] < math.inf:
                raise ValueError(f"l1 must be 0 or more and finite, got {group['l1']}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; a parameter without a gradient stays as it is. Returns what the closure, if any, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                total = state["sum"].addcmul_(p.grad, p.grad)
                rate = (group["lr"] / total.sqrt()).masked_fill_(total == 0, 0.0)
                moved = p.addcmul(rate, p.grad, value=-1.0)
                p.copy_(moved.sign() * (moved.abs() - rate * group["l1"]).clamp_(min=0.0))
        return loss
