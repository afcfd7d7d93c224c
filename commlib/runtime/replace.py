"""Keys that hold no model, but what was pushed last: for gradients that are summed at shards, and pulled by all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.optim import Optimizer


class Replace(Optimizer):
    """Puts a gradient in the values' place. Its cell lets all through that an all-reduce would: NaN and infinities too.

    Args:
        params: as of any optimizer.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss to return
        """Once; a parameter without a gradient stays as it is."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(p.grad)
