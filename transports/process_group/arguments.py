"""Whether the tensors of a call fit together, and how they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Parts = Sequence[Tensor]


def one(given: Any) -> Any:
    """The only one; or the tensor itself, which the short forms of PyTorch's calls take.

    Raises:
        ValueError: there are more, or none.
    """
    if isinstance(given, Tensor):
        return given
    if len(given) != 1:
        raise ValueError(f"the zmq backend takes one tensor (or one list of them) a call, got {len(given)}")
    return given[0]


def listed(given: Any) -> Any:
    """The only list of tensors; or the list itself, which the short forms of PyTorch's calls take.

    Raises:
        ValueError: there are more, or none.
    """
    return given if len(given) and isinstance(given[0], Tensor) else one(given)


def options(kind: type[Any], given: Any, timeout: Any = None, **short: Any) -> Any:
    """Options of a call: as given, or made of the values that its short form takes.

    Args:
        kind: PyTorch's options.
        given: such options, or None, or the first value of the short form: an operation or a root.
        timeout: of the short form.
        short: names and values of the short form; the first is ``given``, if that is a value.
    """
    if given is not None and not isinstance(given, (int, dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return given
    made, first = kind(), True
    for name, value in short.items():
        value = given if first and value is None else value
        first = False
        if value is not None:
            setattr(made, name, value)
    if timeout is not None:
        made.timeout = timeout
    return made


def member(what: str, rank: int, size: int) -> int:
    """The rank, if a group of this size has it.

    Raises:
        ValueError: it has not.
    """
    if not 0 <= rank < size:
        raise ValueError(f"{what}: there is no rank {rank} in this group, which has ranks 0 to {size - 1}")
    return rank


def text(flat: Tensor) -> str:
    """``1024 × float32``."""
    return f"{flat.numel()} × {kind(flat.dtype)}"


def kind(dtype: torch.dtype) -> str:
    """Name of a dtype, as ``float32``."""
    return str(dtype).removeprefix("torch.")


def shares(whole: Tensor, size: int, each: int) -> list[Tensor]:
    """(P·n,) as P times (n,).

    Raises:
        ValueError: it has another length.
    """
    if whole.numel() != size * each:
        raise ValueError(f"{size} ranks with {each} values each have {size * each}, and the whole has {whole.numel()}")
    return list(whole.view(size, each).unbind())


def lengths(tensor: Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Values of each rank's part, if ``tensor`` is split along dimension 0: evenly, if no rows are given.

    Raises:
        ValueError: it cannot be split so.
    """
    if not rows:
        if tensor.shape[0] % size:
            raise ValueError(f"{tensor.shape[0]} rows cannot be split evenly between {size} ranks")
        rows = [tensor.shape[0] // size] * size
    if len(rows) != size or sum(rows) != tensor.shape[0]:
        raise ValueError(f"splits {list(rows)} are not {size} that make {tensor.shape[0]} rows")
    each = tensor.numel() // max(1, tensor.shape[0])
    return [r * each for r in rows]


def check(what: str, parts: Parts, own: Tensor, rank: int, size: int) -> None:
    """Whether ``parts`` are one for each rank, this one's like ``own``.

    Raises:
        ValueError: they are not.
    """
    if len(parts) != size:
        raise ValueError(f"{what} wants a list of {size} tensors, got {len(parts)}")
    if any(p.dtype != own.dtype for p in parts):
        raise ValueError(f"{what} wants tensors of one dtype, got {sorted({str(t.dtype) for t in (own, *parts)})}")
    if parts[rank].numel() != own.numel():
        raise ValueError(f"{what}: this rank's tensor has {own.numel()} values, and its place {parts[rank].numel()}")
