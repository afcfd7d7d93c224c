"""Reductions of process groups: what adding tensors up means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.transports.process_group.algorithms.steps import Fold

_Add = Callable[[Tensor, Tensor], object]

_OPS: Any = dist.ReduceOp.RedOpType
_ADDS: Mapping[Any, tuple[str, _Add]] = {
    _OPS.SUM: ("sum", Tensor.add_),
    _OPS.AVG: ("average", Tensor.add_),
    _OPS.PRODUCT: ("product", Tensor.mul_),
    _OPS.MIN: ("minimum", lambda a, b: torch.minimum(a, b, out=a)),
    _OPS.MAX: ("maximum", lambda a, b: torch.maximum(a, b, out=a)),
    _OPS.BAND: ("bitwise and", Tensor.bitwise_and_),
    _OPS.BOR: ("bitwise or", Tensor.bitwise_or_),
    _OPS.BXOR: ("bitwise xor", Tensor.bitwise_xor_),
}
_BITWISE = frozenset({"bitwise and", "bitwise or", "bitwise xor"})


def fold(op: Any, dtype: torch.dtype, size: int) -> tuple[str, Fold]:
    """A ``dist.ReduceOp``'s name, and what it does between ``size`` ranks.

    Raises:
        ValueError: an operation that there is not, or not of this dtype.
    """
    kind = getattr(op, "op", op)
    if kind not in _ADDS:
        raise ValueError(f"the zmq backend has no {kind}; it has {', '.join(name for name, _ in _ADDS.values())}")
    name, add = _ADDS[kind]
    real = dtype.is_floating_point or dtype.is_complex
    if name in _BITWISE and real:
        raise ValueError(f"a {name} is of whole numbers, not of {dtype}")
    if name in ("minimum", "maximum") and dtype.is_complex:
        raise ValueError(f"{dtype} has no {name}")
    if name == "average":
        if not real:
            raise ValueError(f"an average is of floating-point numbers, not of {dtype}")
        return name, Fold(add, lambda total: total.div_(size))
    return name, Fold(add)


def nbytes(flats: Sequence[Tensor]) -> int:
    """Bytes of all of them."""
    return sum(f.nbytes for f in flats)
