"""Values computed on the device, read by the host later without stalling it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Readback:
    """Copies small tensors of one shape to the host, one at a time; :meth:`get` waits for that copy only.

    On CUDA the copy goes to pinned memory behind the work already on the current stream. Asked for a
    step later, as commlib does, it is there: the host then still runs a whole forward pass ahead.
    """

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._event: Any = None

    def start(self, value: Tensor) -> None:
        """Begin with the copy of another one, which on the CPU is no copy: it is read when it is asked for."""
        if value.device.type != "cuda":
            self._host = value
            return
        if self._host is None or self._event is None or self._host.dtype != value.dtype:
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._host.copy_(value, non_blocking=True)
        self._event.record()

    def get(self) -> list[float]:
        """Its values; none if nothing was ever copied."""
        if self._event is not None:
            self._event.synchronize()
        return [] if self._host is None else self._host.view(-1).tolist()
