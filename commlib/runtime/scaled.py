"""A GradScaler whose gradients are shared out: it is told what all ranks have found, and no rank's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from commlib.errors import CommlibError
from commlib.runtime.loss_scale import LossScale


class Scale:
    """Of one step after another. Without a scaler, or with one that is not enabled, it is 1.

    Args:
        scaler: the user's, or None.
        optimizer: whose step it is.
        module: whose forward pass begins a step.

    Raises:
        TypeError: this is no GradScaler.
    """

    def __init__(self, scaler: Any, optimizer: Optimizer, module: nn.Module) -> None:
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._optimizer, self._follow = optimizer, LossScale(self._scaler, module)

    def now(self) -> float:
        """By how much the gradients of the step under way are too large."""
        return self._follow.now()

    def tell(self, finite: bool, device: torch.device) -> None:
        """The scaler, for its ``update()``.

        Raises:
            CommlibError: ``scaler.unscale_(optimizer)`` was called, or ``scaler.update()`` was not.
        """
        if self._scaler is None:
            return
        state = self._scaler._per_optimizer_states[id(self._optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise CommlibError(
                "scaler.unscale_() sees one rank's gradients, which have left: leave it out; clip_grad_norm_ of this "
                "step sees the means of all without the scale"
            )
        if state["stage"] is OptState.STEPPED:
            raise CommlibError("scaler.update() was not called since the step before")
        state["found_inf_per_device"] = {device: torch.tensor(float(not finite), device=device)}
        state["stage"] = OptState.STEPPED
