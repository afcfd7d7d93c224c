"""``owners``: the rows a linear layer's gradient is made of go to whom its blocks belong, and the blocks to everybody.

Project Adam's exchange (Chilimbi et al., OSDI 2014: factors to the machine that owns the layer, the matrix back),
balanced as in SACP (arXiv 1512.06216): every rank owns a block of the larger dimension
(:mod:`commlib.exchange.factors.delivery`). It gets its columns of one factor and all of the other from every rank, as
soon as their backward passes come to the layer; multiplies rows of all ranks in rank order; and all gather the blocks.
So a rank computes no more than it would for its own rows, and all have the same bytes, whatever machine has made a
block.

Order: the wait, and perhaps a second round, are :mod:`commlib.exchange.factors.broadcast`. One all-gather follows for
all layers of the bucket whose rows have come, if any: the same layers on every rank, hence the same lengths, and either
every rank issues it in the bucket's next lane or none does. A weight and its bias in two buckets come to that lane in
two gathers, in the order of the buckets, alike on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.buffers import Packing, rows
from commlib.exchange.collectives import AllGather, Rounds
from commlib.exchange.factors import broadcast
from commlib.exchange.factors.broadcast import FactorExchange, RowExchange
from commlib.exchange.factors.delivery import BlockShares, OwnerDelivery
from commlib.exchange.factors.payload import RowCapacity
from commlib.exchange.layer_task import LayerTask, payers
from commlib.groups.world import World


class OwnerExchange(RowExchange):
    """Rows to the owners of a layer's blocks, and the blocks to everybody."""

    name = "owners"
    ROUNDS = FactorExchange.ROUNDS + 1

    def sending(self, codec: Compressor, n: int, m: int, world: World) -> OwnerDelivery:
        """Delivery to the owners of a layer with weight (N, M)."""
        return OwnerDelivery(n, m, world)

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """Refuse what is no weight or bias of a linear layer, and every codec but ``none``."""
        if not codec.lossless:
            return "owners sends rows and blocks as they are, nothing compressed: rows by a codec go over factors"
        return super().refuse(codec, spec)

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Bytes the busiest rank sends a step; NaN for a weight while K is unknown.

        (P − 1)·K(M + N/P) + (P − 1)/P·NM values for a weight with N ≥ M, the other way round for another, and (P −
        1)/P·N for a bias; a little more where P does not divide N.
        """
        if spec.kind != "linear.weight":
            return (world - 1) * -(-spec.numel // world) * spec.dtype.itemsize
        if spec.rows is None:
            return math.nan
        made = self.sending(codec, *spec.matrix, World(0, world))
        return made.busiest(RowCapacity(spec.rows, spec.dtype), spec.dtype)

    def rounds(self, items: Sequence[LayerTask], world: World, buffer: Tensor | None) -> Rounds:
        """Collect the rows, multiply this rank's blocks, and gather all."""
        collected = yield from broadcast.collect(items, world)
        if not collected:
            return
        here = broadcast.targets(collected)
        parts = [_parts(item, world.size) for item in here]
        lengths = [max(p.numel() for p in own) * item.grad.itemsize for item, own in zip(here, parts, strict=True)]
        packing = Packing(lengths)
        gathered, mine = here[0].arena.gathered(packing.total, world, here[0].grad.device)
        for item, own, room in zip(here, parts, packing.slices(mine), strict=True):
            with item.meter.phase("decompress"):
                _make(item, world, _like(own[world.rank], room))
        yield [AllGather(gathered, mine, payers(here, lengths))]
        for j, row in enumerate(rows(gathered, world.size)):
            for item, own, room in zip(here, parts, packing.slices(row), strict=True):
                with item.meter.phase("decompress"):
                    own[j].copy_(_like(own[j], room))
        broadcast.compare(here, collected)


def _shares(item: LayerTask, size: int) -> BlockShares:
    return BlockShares(*broadcast.trip_of(item).shape, size)


def _parts(item: LayerTask, size: int) -> list[Tensor]:
    """Views of the gradient: what each rank makes of it."""
    shares, grad = _shares(item, size), item.grad.view(item.spec.shape)
    if item.spec.kind == "linear.weight":
        return [grad[shares.outputs(rank), shares.inputs(rank)] for rank in range(size)]
    return [grad[shares.bias(rank)] for rank in range(size)]


def _make(item: LayerTask, world: World, out: Tensor) -> None:
    """This rank's part of the mean gradient."""
    shares, (u, v) = _shares(item, world.size), broadcast.trip_of(item).everyone()
    weight = item.spec.kind == "linear.weight"
    if not weight and not shares.by_outputs:  # all of V has come, and every rank sums some of its columns
        v = v[:, shares.bias(world.rank)]
    broadcast.multiply((u, v), out, weight=weight)


def _like(part: Tensor, room: Tensor) -> Tensor:
    """The beginning of a payload as values of a part's shape."""
    return room[: part.numel() * part.itemsize].view(part.dtype).view(part.shape)
