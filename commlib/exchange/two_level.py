"""Two levels: sums inside a node, the routes' own exchanges between nodes, copies inside a node; rows go flat.

As in hierarchical all-reduce (Goyal et al. 2017, section 4; BlueConnect, Cho et al. 2019), with any exchange in the
middle. Every local rank sums a stripe of each layer and exchanges it with its counterparts on the other nodes: so a
node's link carries each value once a rank of the ring of *nodes*, shared out among its ranks.

Stripes are cut per layer, along rows, at the boundaries of the planned codec, and never per bucket: so residuals do not
depend on how DDP fills its buckets. Stage 1 is an all-to-all and a sum in local order, in place of a reduce-scatter:
the same bytes, but stripes may be unequal, and the order of the sum does not depend on a value's place in its bucket.

Rows of linear layers (``BY_ROWS``) go from every rank to every rank beside all that: those of a node's ranks do not add
up to fewer, so two levels would carry as many of them between nodes, but for those that a node's own ranks need.

All ranks end with the same bits: counterparts by the promise of the exchange between them, the ranks of a node because
they gather the same bytes. An inf or NaN stays in the sum, reaches all counterparts, and by the gathering all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from commlib.exchange.buffers import own_row, rows
from commlib.exchange.collectives import AllGather, AllToAll, Among, Rounds, among, lockstep
from commlib.exchange.layer_task import LayerTask, Stripe, payers
from commlib.exchange.registry import BY_ROWS, EXCHANGES
from commlib.groups.world import World

MORE_ROUNDS = 2
"""Rounds besides those between nodes: one before and one after."""


def rounds(
    routes: Mapping[str, Sequence[LayerTask]],
    cuts: Mapping[str, Sequence[Stripe]],
    world: World,
    local: World,
    inter: World,
) -> Rounds:
    """Replace the gradients of a bucket by their means over all ranks of all nodes; bitwise the same on every rank.

    Exchanges that go flat run beside the two levels, round by round, over all ranks. Every rank goes through equally
    many rounds of the same scopes, for routes are the same on all of them; one whose stripes are all empty takes part
    with no bytes.

    Args:
        routes: exchange → its items, in the same order on every rank: the whole layer's spec and gradient, but memory
            and owner for this rank's stripe, unless the exchange goes flat.
        cuts: layer → a stripe for each local rank; of those that do not go flat.
        world: this rank among all.
        local: this rank in its node.
        inter: this rank's node, among nodes.
    """
    shared = {exchange: items for exchange, items in routes.items() if exchange not in BY_ROWS}
    flat = [EXCHANGES[name].rounds(items, world, None) for name, items in routes.items() if name in BY_ROWS]
    yield from lockstep([*([_two_levels(shared, cuts, local, inter)] if shared else []), *flat])


def _two_levels(
    routes: Mapping[str, Sequence[LayerTask]], cuts: Mapping[str, Sequence[Stripe]], local: World, inter: World
) -> Rounds:
    """The layers that are shared out among a node's ranks, as :func:`rounds`."""
    items = [item for part in routes.values() for item in part]
    table = [[stripe.spec.numel for stripe in cuts[item.spec.name]] for item in items]
    layouts = [list(layout) for layout in zip(*table, strict=True)]  # [local rank][layer]: values
    totals = [sum(layout) for layout in layouts]
    mine = totals[local.rank]
    grads = [torch.split(item.grad.view(-1), lengths) for item, lengths in zip(items, table, strict=True)]
    like, arena = items[0].grad, items[0].arena
    size = like.itemsize

    with items[0].meter.phase("compress"):
        room = arena.empty((max(sum(totals), local.size * max(totals)),), like.dtype, like.device)
        send = room[: sum(totals)]
        torch.cat([grad[j] for j in range(local.size) for grad in grads], out=send)
    received = arena.empty((local.size * mine,), like.dtype, like.device)
    shares = payers(items, [item.grad.nbytes for item in items])
    splits = [n * size for n in totals]
    out_splits = [mine * size] * local.size
    yield [Among("local", AllToAll(_bytes(received), _bytes(send), out_splits, splits, local.rank, shares))]

    gathered = room[: local.size * max(totals)]  # what it was for has been sent
    reply = own_row(gathered, local)
    mean = reply[:mine]
    with items[0].meter.phase("decompress"):
        first, *others = rows(received, local.size)
        torch.mul(first, 1 / local.size, out=mean)  # divided before the sum, as DDP does: no overflow on the way
        for part in others:
            mean.add_(part, alpha=1 / local.size)
    views = iter(torch.split(mean, layouts[local.rank]))
    stripes = {
        exchange: [_stripe(item, cuts[item.spec.name][local.rank], next(views)) for item in part]
        for exchange, part in routes.items()
    }
    whole = mean if len(routes) == 1 else None
    between = [EXCHANGES[exchange].rounds(part, inter, whole) for exchange, part in stripes.items()]
    yield from among("inter", lockstep(between))

    shares = payers(items, [n * size for n in layouts[local.rank]])
    yield [Among("local", AllGather(_bytes(gathered), _bytes(reply), shares))]

    with items[0].meter.phase("decompress"):
        for j, row in enumerate(rows(gathered, local.size)):
            for grad, values in zip(grads, torch.split(row[: totals[j]], layouts[j]), strict=True):
                grad[j].copy_(values)


def _stripe(item: LayerTask, stripe: Stripe, mean: Tensor) -> LayerTask:
    """Task of one layer's stripe between nodes; random codecs draw other numbers for each stripe."""
    spec = dataclasses.replace(stripe.spec, dtype=item.spec.dtype)
    seeds = dataclasses.replace(item.seeds, layer=f"{item.seeds.layer}/rows from {stripe.start}")
    return dataclasses.replace(item, spec=spec, grad=mean, seeds=seeds)


def _bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
