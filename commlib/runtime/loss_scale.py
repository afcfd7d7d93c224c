"""What a GradScaler multiplies gradients by, known to the host without stalling the device."""

from __future__ import annotations

from typing import Any

from torch import nn

from commlib.runtime.readback import Readback


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
        if scaler is not None and next(module.parameters()).is_cuda:
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
