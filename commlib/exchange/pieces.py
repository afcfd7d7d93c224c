"""A collective in pieces, so that no more than a limit's burst is under way at once.

All ranks must cut alike. So the number of pieces follows from what all of them know: the length of an all-reduced
tensor or of one rank's payload; in an all-to-all, the lengths of all stripes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from commlib.exchange.buffers import rows


def _nothing() -> None: ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a collective that leaves at once.

    Args:
        sent: payload bytes this rank sends.
        start: issues it; returns the Work.
        finish: once the work is done, brings what came where it belongs.
    """

    sent: float
    start: Callable[[], Any]
    finish: Callable[[], None] = _nothing


def all_reduce(group: Any, tensor: Tensor, most: float, *options: Any) -> Iterator[Piece]:
    """Slices of ``tensor`` (contiguous), each summed in place.

    An all-reduce adds in an order that depends on a value's place, so between three or more ranks a slice's sum may
    differ in its last bits from the whole's; never from rank to rank.

    Args:
        group: process group.
        tensor: any shape and dtype.
        most: bytes that a piece may send; what cannot be cut so small sends more.
        *options: of the process group's ``allreduce``.
    """
    world = group.size()
    share = 2 * (world - 1) / world
    flat = tensor.view(-1)
    for a, b in _cuts(len(flat), share * tensor.nbytes, most):
        part = flat[a:b]
        yield Piece(share * part.nbytes, functools.partial(group.allreduce, [part], *options))


def all_gather(group: Any, out: Tensor, tensor: Tensor, most: float) -> Iterator[Piece]:
    """Slices of every rank's ``tensor``, shape (n,), into ``out``, shape (P·n,).

    A slice of all ranks does not lie in one place of ``out``: it is copied there when it has come.
    """
    world = group.size()
    wholes = rows(out, world)
    cuts = _cuts(len(tensor), (world - 1) * tensor.nbytes, most)
    for a, b in cuts:
        part = tensor[a:b]
        got = out if len(cuts) == 1 else torch.empty(world * (b - a), dtype=out.dtype, device=out.device)
        start = functools.partial(group._allgather_base, got, part)
        places = [] if len(cuts) == 1 else [whole[a:b] for whole in wholes]
        yield Piece((world - 1) * part.nbytes, start, functools.partial(_place, rows(got, world), places))


def all_to_all(
    group: Any, out: Tensor, tensor: Tensor, out_splits: Sequence[int], splits: Sequence[int], most: float
) -> Iterator[Piece]:
    """The same share of every rank's part at a time. ``splits`` must be the same on every rank."""
    own = group.rank()
    outgoing, incoming = torch.split(tensor, list(splits)), torch.split(out, list(out_splits))
    count = _count(max(splits), (sum(splits) - min(splits)) * tensor.itemsize, most)
    for j in range(count):
        sends, places = ([_share(part, j, count) for part in parts] for parts in (outgoing, incoming))
        sizes, got_sizes = [len(s) for s in sends], [len(p) for p in places]
        send = tensor if count == 1 else torch.cat(sends)
        got = out if count == 1 else torch.empty(sum(got_sizes), dtype=out.dtype, device=out.device)
        start = functools.partial(group.alltoall_base, got, send, got_sizes, sizes)
        sent = (sum(sizes) - sizes[own]) * tensor.itemsize
        parts = [] if count == 1 else list(torch.split(got, got_sizes))
        yield Piece(sent, start, functools.partial(_place, parts, places if parts else []))


def _count(length: int, sent: float, most: float) -> int:
    """Pieces to cut something of this length into, of which the busiest rank sends so many bytes."""
    return max(1, min(length, math.ceil(sent / most)))


def _cuts(length: int, sent: float, most: float) -> list[tuple[int, int]]:
    count = _count(length, sent, most)
    return list(pairwise(length * j // count for j in range(count + 1)))


def _share(part: Tensor, j: int, count: int) -> Tensor:
    return part[len(part) * j // count : len(part) * (j + 1) // count]


def _place(parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for part, place in zip(parts, places, strict=False):  # no places: it has come where it belongs
        place.copy_(part)
