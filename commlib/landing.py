"""Where a dense bucket's mean lands: in memory that becomes the parameters' gradients, so that DDP need not copy it.

Without a hook DDP divides by P while it copies the gradients into its bucket, and copies the mean out afterwards. With
a hook it copies in without dividing, and the division is one more pass over all gradients: on a CPU with a fast link
some 3 % of a step. So here the division writes into memory of its own, the parameters' ``grad`` become views of it, and
DDP, which would copy the mean onto itself, sees that and does not. The passes are as many as without a hook.

Nobody may notice. A ``grad`` is replaced only if this backward pass has made it and nobody else has it or a view of it:
whoever gave a parameter a ``grad`` of his own, or accumulates into the last one, keeps it. And a step's memory is used
again only when no view of it is left but DDP's own, one a parameter: whoever keeps a ``grad`` keeps its values.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_COUNTS = hasattr(torch._C, "_storage_Use_Count")  # not public; without it, gradients stay where they are


class Landing:
    """The memory of each bucket.

    Args:
        module: what is attached. Gradients are left where they are unless it is a DDP model on CPUs that copies them
            out of its buckets, and all of them in every step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._ddp = weakref.ref(module) if isinstance(module, DistributedDataParallel) else None
        self._steps, self._on = 0, False
        self._last: dict[int, Tensor] = {}

    def begin(self, *, came_through: bool) -> None:
        """A step begins.

        Args:
            came_through: whether the step before did; if not, nobody knows what DDP has views of.
        """
        ddp = None if self._ddp is None else self._ddp()
        self._steps += 1
        self._on = _COUNTS and self._steps > 1 and ddp is not None and _copies_out(ddp)
        if not came_through:
            self._last.clear()

    def of(self, bucket: Any, *, wanted: bool) -> Tensor:
        """Where a bucket's mean is to be written: memory of which its parameters' gradients are views from now on.

        Or its own buffer, as long, from where DDP copies to the gradients, if they must stay what they are. (They do in
        the first step, after which DDP may fill its buckets anew.)

        Args:
            bucket: DDP's, in the step under way. To be shown in every step, or nobody knows what DDP has views of.
            wanted: whether the bucket is plain.
        """
        last = self._last.pop(bucket.index(), None)
        parameters: list[Tensor] = bucket.parameters()
        buffer: Tensor = bucket.buffer()
        if not (wanted and self._on and buffer.device.type == "cpu") or not _are_new(parameters, buffer):
            return buffer
        if last is None or last.shape != buffer.shape or last.dtype != buffer.dtype or _views(last) > len(parameters):
            last = torch.empty_like(buffer)
        self._last[bucket.index()] = last
        for p, g in zip(parameters, bucket.gradients(), strict=True):
            p.grad = last.as_strided(p.shape, p.stride(), g.storage_offset())  # g itself has other strides than DDP's
        return last


def _copies_out(ddp: DistributedDataParallel) -> bool:
    aliased = ddp.gradient_as_bucket_view or ddp.mixed_precision is not None
    return not (aliased or ddp.find_unused_parameters or ddp.static_graph)


def _are_new(parameters: Sequence[Tensor], buffer: Tensor) -> bool:
    """Whether this backward pass has made their gradients, and nobody else has one.

    The engine itself still holds what the last of them, with which the bucket was complete, was made of.
    """
    held = 0
    for p in parameters:
        if not _is_plain(p, buffer):
            return False
        references, views = _holders(p)
        held += views > _ALONE[1]
        if references != _ALONE[0] or held > 1:
            return False
    return True


def _is_plain(p: Tensor, buffer: Tensor) -> bool:
    """Whether its gradient was never written to since it was made, and lies in DDP's bucket as the parameter does."""
    grad = p.grad
    return (
        grad is not None
        and grad._version == 0
        and grad.layout == torch.strided
        and grad.dtype == buffer.dtype
        and not grad.requires_grad
        and not getattr(p, "_post_accumulate_grad_hooks", None)  # who may have kept it
        and (p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last))
    )


def _holders(p: Tensor) -> tuple[int, int]:
    """References to its gradient, and to the memory of it; comparable with each other."""
    grad = p.grad
    assert grad is not None
    return sys.getrefcount(grad), _views(grad)


def _views(x: Tensor) -> int:
    """How many other tensors there are on its memory."""
    storage = x.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 2  # of the storage's Python object, and of x


def _alone() -> tuple[int, int]:
    p = nn.Parameter(torch.zeros(1))
    p.grad = torch.zeros(1)
    return _holders(p)


_ALONE = _alone() if _COUNTS else (0, 0)
