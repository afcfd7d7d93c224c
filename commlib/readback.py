"""A value computed on the device, read by the host later without stalling it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Readback:
    """Starts copying a one-element tensor to the host at once; :meth:`get` waits for that copy only.

    On CUDA the copy goes to pinned memory behind the work already on the current stream. Asked for a
    step later, as commlib does, it is there: the host then still runs a whole forward pass ahead.
    """

    def __init__(self, value: Tensor) -> None:
        self._event: Any = None
        if value.device.type == "cuda":
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = value

    def get(self) -> float:
        """The value."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._host)
