"""Large memory in large pages: what a step reads and writes all of once.

A page of 4 kB costs a fault when it is first touched, and a look at the page tables whenever its turn comes again: a
copy takes a third longer than over pages of 2 MB. Linux has these for whoever asks (``madvise``), as it is set up on
most systems; where it does not, or on another system, the memory is as any.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE = 2 << 20
_LEAST = 4 << 20  # bytes, from which on it pays


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.zeros``; of CPU memory, from 4 MiB on, in large pages where the system has them."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = _room(nbytes + _PAGE) if device.type == "cpu" and nbytes >= _LEAST else None
    if room is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    whole = torch.frombuffer(room, dtype=torch.uint8)  # holds the room, which is given back with it
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + nbytes].view(dtype).view(tuple(shape))


def _room(nbytes: int) -> mmap.mmap | None:
    """Memory fresh from the system, which has zeroed it; None if it cannot be asked for large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        room.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel built without them; or no memory, which PyTorch says better
        return None
    return room
