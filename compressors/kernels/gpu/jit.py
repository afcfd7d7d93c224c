"""How kernels for GPUs are compiled and started; with ``TRITON_INTERPRET=1`` at import Triton interprets them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import triton
from torch import Tensor

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):  # 3.3 flushes small quotients to zero
    raise ImportError(
        f"Triton {triton.__version__} is older than 3.6, and not known to compute what the reference does"
    )

F = TypeVar("F", bound=Callable[..., Any])

_ANY = ("low", "high", "bar")

# A fused multiply-add would round once where the reference rounds twice.
AS_WRITTEN = {"enable_fp_fusion": False}


def jit(kernel: F) -> F:
    """Compiles a kernel, or a part of one, when it is first run.

    Words of a seed, and a step's bar, never make a variant of their own.
    """
    words = [name for name in _ANY if name in kernel.__code__.co_varnames]
    return cast(F, triton.jit(kernel, do_not_specialize=words))


def interpreted() -> bool:
    """Whether kernels are interpreted, and so run on CPU tensors; decided when this file is imported."""
    return not isinstance(_probe, triton.JITFunction)


@jit
def _probe() -> None:
    """Kernel that shows whether Triton compiles or interprets."""


def launch(
    kernel: Any,
    programs: int,
    like: Tensor,
    *args: Any,
    warps: int = 4,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """Start so many programs of a kernel on the device of a tensor, on its current stream.

    Args:
        kernel: as :func:`jit` has made it.
        programs: how many.
        like: the tensor.
        *args: of the kernel.
        warps: of a program.
        registers: that a thread may have at most: the fewer, the more programs run at a time.
        **constants: of the kernel.
    """
    elsewhere = like.is_cuda and like.device.index != torch.cuda.current_device()
    with torch.cuda.device(like.device) if elsewhere else contextlib.nullcontext():
        kernel[(programs,)](*args, num_warps=warps, maxnreg=registers, **AS_WRITTEN, **constants)
