"""Collectives that compute nothing: everyone's values go where they are wanted, as they are.

Small ones go straight from each to each, in one hop. Large ones pass along a ring or a chain in pieces: each link then
carries them once, nobody's line is shared by several senders, and a rank passes a piece on while the next one comes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from commlib.transports.process_group.algorithms.steps import Position, Schedule, Send, into, receive, to


def broadcast(place: Position, flat: Tensor, root: int) -> Schedule:
    """(n,) of ``root`` to all, straight."""
    if place.rank != root:
        yield from into(root, place, flat)
        return
    for part in place.pieces(flat):
        for other in place.others():
            yield Send(other, part)


def broadcast_chain(place: Position, flat: Tensor, root: int) -> Schedule:
    """(n,) of ``root`` to the next on the ring, and so on."""
    for part in place.pieces(flat):
        if place.rank != root:
            part.copy_((yield from receive(place.left, part)))
        if place.right != root:
            yield Send(place.right, part)


def all_gather(place: Position, outs: Sequence[Tensor], flat: Tensor) -> Schedule:
    """``outs[p]``, (n,) ← rank p's ``flat``, (n,), straight."""
    outs[place.rank].copy_(flat)
    for other in place.others():
        yield from to(other, place, flat)
    for source in place.sources():
        yield from into(source, place, outs[source])


def all_gather_ring(place: Position, outs: Sequence[Tensor], flat: Tensor) -> Schedule:
    """The same, each part once around the ring, of two ranks or more. The parts need not be of one length."""
    outs[place.rank].copy_(flat)
    yield from to(place.right, place, outs[place.rank])
    yield from around(place, outs)


def around(place: Position, outs: Sequence[Tensor]) -> Schedule:
    """The ring's rest, once everyone has sent its own part: each is taken, and passed on but by its last."""
    for source in place.sources():
        for part in place.pieces(outs[source]):
            part.copy_((yield from receive(place.left, part)))
            if source != place.right:
                yield Send(place.right, part)


def gather(place: Position, outs: Sequence[Tensor], flat: Tensor, root: int) -> Schedule:
    """``outs[p]``, (n,) ← rank p's ``flat``, (n,), on ``root`` only, which takes them one after another."""
    if place.rank != root:
        yield from to(root, place, flat)
        return
    outs[root].copy_(flat)
    for source in place.sources():
        yield from into(source, place, outs[source])


def scatter(place: Position, out: Tensor, parts: Sequence[Tensor], root: int) -> Schedule:
    """``out``, (n,) ← ``parts[rank]``, (n,), of ``root``."""
    if place.rank != root:
        yield from into(root, place, out)
        return
    out.copy_(parts[root])
    for other in place.others():
        yield from to(other, place, parts[other])


def all_to_all(place: Position, outs: Sequence[Tensor], parts: Sequence[Tensor]) -> Schedule:
    """``outs[p]`` ← rank p's part for this one; of any lengths.

    In rounds: in the k-th a rank sends to the k-th on its right, and receives from the k-th on its left. So each line
    carries one message at a time each way; all at once, senders would share receivers' lines unevenly.
    """
    outs[place.rank].copy_(parts[place.rank])
    for other, source in zip(place.others(), place.sources(), strict=True):
        yield from to(other, place, parts[other])
        yield from into(source, place, outs[source])
