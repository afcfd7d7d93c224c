"""Mixed precision: the loss scale of a GradScaler, finite checks, and optimizers whose gradients others average.

:class:`LossScale` is what a scaler multiplies gradients by, known to DDP's hook without stalling the device.
:class:`Scale` and :class:`Scaled` are for a parameter server's workers: nobody but autograd sees the scale. Gradients
that leave during the backward pass are divided in their copies; parameters' own are divided once, at the end of the
step, and by the scaler itself, so it knows whether one has overflowed when its ``update()`` asks. The scale is read
when the first gradient leaves; that waits for the device, as the gradient's copy does anyway. A scaler whose gradients
are shared out (:mod:`commlib.zero`) is told what all ranks have found, and no rank's own.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from commlib.errors import CommlibError
from commlib.runtime.streams import Readback, accelerator


def finite(*tensors: Tensor) -> bool:
    """Whether all their values are; a device is waited for once. One pass where the sums say so; one that overflows
    does not."""
    floats = [x for x in tensors if x.is_floating_point()]
    if not floats or bool(torch.stack([x.sum().double() for x in floats]).isfinite().all()):
        return True
    return bool(torch.stack([x.isfinite().all() for x in floats]).all())


_log = logging.getLogger("commlib")


class Scaled:
    """Gradients of one optimizer as one worker's scaler has scaled them.

    Args:
        scaler: one that is enabled.
        optimizer: of all parameters whose gradients leave.
    """

    def __init__(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._scaler, self._optimizer = scaler, optimizer
        self._factor: float | None = None  # of gradients as they lie in parameters; None: nobody has asked in this step
        self._warned = False

    @classmethod
    def of(cls, scaler: Any, optimizer: Optimizer) -> Scaled | None:
        """The user's; None, if there is none, or it is not enabled.

        Raises:
            TypeError: this is no GradScaler.
        """
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        return cls(scaler, optimizer) if scaler is not None and scaler.is_enabled() else None

    def unscale(self, row: Tensor) -> Tensor | None:
        """A copy of gradients, (n,), as they would be of the loss itself, in place; None: they have overflowed.

        Raises:
            CommlibError: the loss was not scaled.
        """
        if self._factor is None:
            scale = self._scaler._get_scale_async()
            if scale is None:
                raise CommlibError("these gradients are not of a scaled loss: call scaler.scale(loss).backward()")
            self._factor = float(scale.detach().cpu().double().reciprocal())
        if self._factor != 1.0:
            row.mul_(self._factor)
        return row if finite(row) else None

    def settle(self) -> None:
        """Parameters' own gradients are without the scale from now on: after the backward pass, once a step.

        Raises:
            CommlibError: the scaler has not been updated since the step before.
        """
        state = self._scaler._per_optimizer_states[id(self._optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise CommlibError(
                "scaler.update() was not called since the step before: after scaler.scale(loss).backward() come "
                "server.step(), in place of scaler.step(optimizer), and scaler.update()"
            )
        scale = self._scaler._get_scale_async()
        if scale is None:
            return  # no loss was scaled yet; if there are gradients all the same, unscale() says so
        if state["stage"] is OptState.UNSCALED:
            self._warn()
        else:
            self._scaler.unscale_(self._optimizer)
        if not state["found_inf_per_device"]:  # no gradient at all, which update() would take for a mistake
            state["found_inf_per_device"] = {scale.device: torch.zeros((), dtype=torch.float32, device=scale.device)}
        state["stage"] = OptState.STEPPED
        self._factor = 1.0

    def end_step(self) -> None:
        """The next one begins."""
        self._factor = None

    def _warn(self) -> None:
        if self._factor is not None and not self._warned:
            _log.warning(
                "scaler.unscale_() was called before server.step(), and gradients have left before that: what was done "
                "to them since, clipping for instance, the servers do not see"
            )
            self._warned = True


class LossScale:
    """Follows a scaler's scale.

    On CUDA the scale lives on the device. It last changed before the forward pass, so its copy to the host
    starts there, and is awaited only when the first gradients are ready.

    Args:
        scaler: a ``torch.amp.GradScaler``, or None for a scale of 1.
        module: whose forward pass begins a step.

    Raises:
        TypeError: the scaler has no ``get_scale``.
    """

    def __init__(self, scaler: Any, module: nn.Module) -> None:
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        self._scaler = scaler
        self._copy, self._copying = Readback(), False
        if scaler is not None and accelerator(next(module.parameters()).device) is not None:
            module.register_forward_pre_hook(self._start)

    def now(self) -> float:
        """The scale of the backward pass under way."""
        if self._scaler is None:
            return 1.0
        copying, self._copying = self._copying, False
        return self._copy.get()[0] if copying else float(self._scaler.get_scale())

    def _start(self, module: nn.Module, inputs: Any) -> None:
        scale = getattr(self._scaler, "_scale", None)  # None until the first loss is scaled
        self._copying = scale is not None
        if scale is not None:
            self._copy.start(scale.detach())


@torch.no_grad()
def mend(optimizer: Optimizer | None) -> None:
    """Zero the tensors in an optimizer's state that are not finite."""
    for state in optimizer.state.values() if optimizer else ():
        for value in state.values():
            if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
                value.zero_()


class Scale:
    """Scale of the loss, step after step. Without a scaler, or with one that is not enabled, it is 1.

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
        """Factor by which the gradients of the step under way are too large."""
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
        state["found_inf_per_device"] = {device: torch.tensor(float(not finite), dtype=torch.float32, device=device)}
        state["stage"] = OptState.STEPPED
