"""Scratch memory that a thread uses again and again, and large memory in large pages.

A page of 4 kB costs a fault when it is first touched, and a look at the page tables whenever its turn comes again: a
copy takes a third longer than over pages of 2 MB. Linux has these for whoever asks (``madvise``), as it is set up on
most systems; where it does not, or on another system, the memory is as any.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

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


def give_back() -> None:
    """Give the system back what the C library keeps of memory that was freed, after work that took much of it for once.

    glibc keeps it between blocks that are still in use, and takes more for the next such work; other libraries have no
    such call, and nothing happens.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # TypeError: Windows
        return None
    return found


class _Held(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[_Use, Tensor] = {}
        self.views: dict[tuple[_Use, tuple[int, ...]], Tensor] = {}


_Use = tuple[str, torch.dtype, torch.device]
_VIEWS = 1024  # of a thread: a model's layers have fewer shapes
_held = _Held()


def scratch(what: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of any content, until this thread asks again for the same: not across a round of an exchange. (On the
    CPU.)

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
    key = (what, dtype, device), tuple(shape)
    view = _held.views.get(key)  # to make one takes as long as to code a small layer
    return _view(*key) if view is None else view


def _view(use: _Use, shape: tuple[int, ...]) -> Tensor:
    size, whole = math.prod(shape), _held.tensors.get(use)
    grows = whole is None or len(whole) < size
    if grows or len(_held.views) >= _VIEWS:
        _held.views.clear()
    if whole is None or grows:
        whole = _held.tensors[use] = zeros((size,), *use[1:])
    found = _held.views[use, shape] = whole[:size].view(shape)
    return found
