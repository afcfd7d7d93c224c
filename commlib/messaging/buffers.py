"""Tensors as the bytes of messages, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commlib.messaging.frame import Buffer


def to_buffer(flat: Tensor) -> Buffer:
    """The bytes of (n,), contiguous, on the CPU; not copied."""
    if flat.stride(0) != 1:  # one value, which PyTorch calls contiguous whatever its stride is, but does not view
        flat = flat.as_strided(flat.shape, (1,))
    found: Any = flat.view(torch.uint8).numpy()
    return memoryview(found)


def from_buffer(buffer: Buffer, dtype: torch.dtype) -> Tensor:
    """(n,) in these bytes, n ≥ 1; copied only if they may not be written to, or lie where the dtype's must not."""
    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)
    found = torch.frombuffer(buffer, dtype=dtype)
    if found.data_ptr() % found.itemsize:  # PyTorch's loops may be compiled for that not to be: complex128 crashed
        return torch.frombuffer(bytearray(buffer), dtype=dtype)
    return found
