"""PyTorch's own gradient compression, timed beside ours: what its hooks compute, with nobody to send to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks

RANK = 4
Once = Callable[[], object]


class _Bucket:
    """A bucket of one gradient, as far as the hooks ask."""

    def __init__(self, gradient: Tensor) -> None:
        self._whole, self._kept = gradient.view(-1), gradient

    def buffer(self) -> Tensor:
        return self._whole

    def set_buffer(self, whole: Tensor) -> None:
        self._whole = whole

    def gradients(self) -> list[Tensor]:
        return [self._kept]

    def parameters(self) -> list[Tensor]:
        return [self._kept]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank, unless there is one; over Gloo, whose all-reduce then has nothing to do."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        # A group whose last reference is dropped by a thread of its own, with a future's, ends the process: so none of
        # those may still be at work, and the last is this one.
        last = dist.GroupMember.WORLD
        for _ in range(4):
            dist.barrier()
        dist.destroy_process_group()
        del last


def peers(gradient: Tensor) -> dict[str, Once]:
    """Name → compress and decompress this gradient once, as the hook does; inside :func:`alone`.

    ``torch-int8`` is the per-tensor quantisation of its hook by the hook's own functions: the hook itself raises an
    error over Gloo (torch 2.13).

    Args:
        gradient: float32, a matrix; each hook works on a copy.
    """
    fp16: Any = _Bucket(gradient.clone())
    low_rank: Any = _Bucket(gradient.clone())
    default: Any = None  # the default group
    state = powerSGD_hook.PowerSGDState(default, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    hooks: dict[str, Once] = {
        "torch-fp16": lambda: default_hooks.fp16_compress_hook(default, fp16).wait(),
        "torch-int8": lambda: _int8(gradient),
        f"torch-powersgd:rank={RANK}": lambda: powerSGD_hook.powerSGD_hook(state, low_rank).wait(),
    }
    for _ in range(3):  # its first steps are dense
        hooks[f"torch-powersgd:rank={RANK}"]()
    return hooks


def _int8(gradient: Tensor) -> Tensor:
    observer: Any = torch.ao.quantization.MinMaxObserver()
    observer(gradient)
    scale, zero = observer.calculate_qparams()
    theirs: Any = quantization_hooks
    whole: Tensor = theirs._dequantize_per_tensor_backend(
        theirs._quantize_per_tensor_backend(gradient, scale, zero), scale, zero
    )
    return whole
