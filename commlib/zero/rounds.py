"""The two halves of an all-reduce, with time between them: gradients to their owners, owners' values to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.exchange.buffers import Arena, rows
from commlib.exchange.collectives import AllGather, Rounds
from commlib.exchange.layer_task import Item
from commlib.exchange.scatter_gather import mean_of_stripe, scatter
from commlib.groups.world import World
from commlib.telemetry.stats import Meter
from commlib.zero.cuts import Cut, rows_of


def to_owners(items: Sequence[Item], world: World, means: Sequence[Tensor]) -> Rounds:
    """Fills ``means``, (n,) each, with the mean over ranks of this rank's stripe of every layer.

    Decoded and added in rank order, so that it does not matter to the result who owns what.
    """
    parts, _, incoming = yield from scatter(items, world)
    for item, part, payloads, mean in zip(items, parts, incoming, means, strict=True):
        found = mean_of_stripe(item, part[world.rank], payloads, world)
        mean.copy_(found.view(-1))


def to_all(
    cuts: Sequence[Cut], wholes: Sequence[Tensor], world: World, arena: Arena, meters: Sequence[Meter]
) -> Rounds:
    """Every rank gets the others' parts of ``wholes``, (n,) each, bit for bit; this rank's own are there already."""
    packings, device = rows_of(cuts, world.size), wholes[0].device
    mine = packings[world.rank]
    send = arena.bytes(max(p.total for p in packings), device)
    for cut, whole, place in zip(cuts, wholes, mine.slices(send), strict=True):
        place.view(whole.dtype).copy_(whole[cut.owned(world.rank, world.size)])
    got = arena.bytes(world.size * len(send), device)
    yield [AllGather(got, send, list(zip(meters, mine.lengths, strict=True)))]
    for p, (packing, row) in enumerate(zip(packings, rows(got, world.size), strict=True)):
        if p != world.rank:
            for cut, whole, came in zip(cuts, wholes, packing.slices(row), strict=True):
                whole[cut.owned(p, world.size)] = came.view(whole.dtype)


def exchanged(part: Tensor, got: Tensor) -> Rounds:
    """All ranks' ``part``, (n,), one after another in ``got``, (P·n,); uint8."""
    yield [AllGather(got, part)]


def gathered(part: Tensor, world: int) -> Tensor:
    """Room for what :func:`exchanged` fills, (P, n)."""
    return torch.empty((world, len(part)), dtype=torch.uint8, device=part.device)
