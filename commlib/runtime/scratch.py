"""Memory for a moment, which a thread uses again and again."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from commlib.runtime import pages


class _Held(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_held = _Held()


def scratch(what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of any content, until this thread asks again for the same: not across a round of an exchange. (On the CPU.)

    Args:
        what: it is for; what two purposes ask for does not overlap.
        shape: of the result; the memory is as large as the largest yet.
        dtype: of the result.
        device: of the result.
    """
    # A mode's tensors may be of its own kind. And on other devices two streams may be at work for one thread, which
    # PyTorch's allocator knows and we do not; nor does memory cost anything there that it has had before.
    if device.type != "cpu" or is_in_torch_dispatch_mode():
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    size, key = math.prod(shape), (what, dtype, device)
    held = _held.tensors.get(key)
    if held is None or len(held) < size:
        held = _held.tensors[key] = pages.zeros((size,), dtype, device)
    return held[:size].view(tuple(shape))
