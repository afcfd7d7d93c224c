"""An optimizer whose rank has met what is not finite."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


@torch.no_grad()
def mend(optimizer: Optimizer | None) -> None:
    """What is not finite in an optimizer's state begins anew."""
    for state in optimizer.state.values() if optimizer else ():
        for value in state.values():
            if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
                value.zero_()
