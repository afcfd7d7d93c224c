"""Collectives that add up. The result of a value is made in one place, or everywhere in the same order: so it is the
same on all ranks, to the last bit.

Straight, everyone's values go to everyone who wants the sum, and are added in the order of ranks. In two shots that is
done for a segment a rank, whose sums then go to everyone. On the ring each rank
adds its own to what comes and passes that on: P − 1 hops, 2(P − 1)/P of the bytes for an all-reduce (Patarasuk & Yuan
2009), and pieces follow each other closely.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.transports.process_group.algorithms.copy import all_gather, around
from commlib.transports.process_group.algorithms.steps import Fold, Free, Position, Schedule, Send, receive, to


def all_reduce(place: Position, flat: Tensor, fold: Fold) -> Schedule:
    """(n,) summed in place, straight."""
    for other in place.others():
        yield from to(other, place, flat)
    total = torch.empty_like(flat)
    yield from _sum(place, total, flat, fold)
    yield Free()
    flat.copy_(total)


def all_reduce_two_shot(place: Position, flat: Tensor, fold: Fold) -> Schedule:
    """(n,) summed in place: every rank sums a segment, straight, and sends it to all. No more bytes than on the ring.

    What is sent before it is overwritten by the sum has arrived: it is part of that.
    """
    segments = place.segments(flat)
    own = torch.empty_like(segments[place.rank])
    yield from reduce_scatter(place, own, segments, fold)
    yield from all_gather(place, segments, own)


def all_reduce_ring(place: Position, flat: Tensor, fold: Fold) -> Schedule:
    """(n,) summed in place: every segment is added up on its way around the ring, then goes round once more.

    Of two ranks or more. What is sent before it is overwritten by the sum has arrived: it is part of that.
    """
    segments = place.segments(flat)
    yield from _add_around(place, segments, segments[place.rank], fold, segments)
    yield from to(place.right, place, segments[place.rank])
    yield from around(place, segments)


def reduce_scatter(place: Position, out: Tensor, parts: Sequence[Tensor], fold: Fold) -> Schedule:
    """``out``, (n,) ← the sum of all ranks' ``parts[rank]``, (n,), straight."""
    for other in place.others():
        yield from to(other, place, parts[other])
    yield from _sum(place, out, parts[place.rank], fold)


def reduce_scatter_ring(place: Position, out: Tensor, parts: Sequence[Tensor], fold: Fold) -> Schedule:
    """The same, around the ring, of two ranks or more."""
    yield from _add_around(place, parts, out, fold)


def reduce(place: Position, flat: Tensor, root: int, fold: Fold) -> Schedule:
    """(n,) summed in place on ``root``, straight; the others' is left as it is."""
    if place.rank != root:
        yield from to(root, place, flat)
        return
    total = torch.empty_like(flat)
    yield from _sum(place, total, flat, fold)
    flat.copy_(total)


def reduce_chain(place: Position, flat: Tensor, root: int, fold: Fold) -> Schedule:
    """The same, from the one after ``root`` along the ring: each link carries the values once."""
    last = (root + 1) % place.size
    for part in place.pieces(flat):
        total = part
        if place.rank != last:
            got = yield from receive(place.left, part)
            total = part if place.rank == root else part.clone()
            fold.add(total, got)
        if place.rank != root:
            yield Send(place.right, total)
    if place.rank == root:
        fold.end(flat)


def _sum(place: Position, out: Tensor, own: Tensor, fold: Fold) -> Schedule:
    """``out`` ← what all have sent, added in the order of ranks; (n,)."""
    for rank in range(place.size):
        for o, mine in zip(place.pieces(out), place.pieces(own), strict=True):
            got = mine if rank == place.rank else (yield from receive(rank, mine))
            if rank == 0:
                o.copy_(got)
            else:
                fold.add(o, got)
    fold.end(out)


def _add_around(
    place: Position, parts: Sequence[Tensor], out: Tensor, fold: Fold, sums: Sequence[Tensor] | None = None
) -> Schedule:
    """``out`` ← the sum of all ranks' ``parts[rank]``. What others own is added up in ``sums``, or in new memory."""
    yield from to(place.right, place, parts[place.left])
    for source in place.sources():
        owner = (source - 1) % place.size  # of what the left has just added to
        whole = out if owner == place.rank else sums[owner] if sums is not None else torch.empty_like(parts[owner])
        for mine, total in zip(place.pieces(parts[owner]), place.pieces(whole), strict=True):
            got = yield from receive(place.left, mine)
            fold.add(mine if sums is not None else total.copy_(mine), got)
            if owner != place.rank:
                yield Send(place.right, total)
    fold.end(out)
