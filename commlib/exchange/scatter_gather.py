"""``scatter_gather``: every rank owns a stripe, sums it, and sends the sum compressed again.

The aggregation of CNTK's 1-bit SGD (Seide et al. 2014): 2(P−1)/P payloads sent instead of gather's P−1,
for a second quantisation with a residual of its own. Stripes are cut *per layer*, along dimension 0 and at
the codec's boundaries, never per bucket: so residuals do not depend on how DDP fills its buckets.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory
from commlib.exchange.base import Exchange
from commlib.exchange.buffers import Packing, own_row, rows
from commlib.exchange.collectives import AllGather, AllToAll, Collective, Rounds
from commlib.exchange.layer_task import WHOLE, ChunkIndex, LayerTask, Stripe, cut
from commlib.groups.world import World
from commlib.runtime.scratch import scratch


def stripes(codec: Compressor, spec: LayerSpec, world: int) -> tuple[Stripe, ...]:
    """Contiguous stripes of a layer, one a rank; see :func:`commlib.exchange.layer_task.cut`."""
    return cut(spec, world, codec.stripe_rows(spec))


class ScatterGatherExchange(Exchange):
    """All-to-all of striped payloads to their owners, and all-gather of the means, encoded again."""

    name = "scatter_gather"
    ROUNDS = 2

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """The owner re-encodes a sum, so the codec may remember nothing but what error feedback adds to it."""
        if not spec.shape:
            return "a scalar has no rows to share out; use gather"
        kept = set(codec.slots(spec))
        if kept and not (kept == {"residual"} and codec.is_feedback):
            return f"it keeps its own {', '.join(sorted(kept))} per worker and cannot re-encode a sum; use gather"
        return None

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Bytes the busiest rank sends a step."""
        lengths = [codec.nbytes(s.spec) for s in stripes(codec, spec, world)]
        return sum(lengths) - min(lengths) + (world - 1) * max(lengths)

    def owned(self, codec: Compressor, spec: LayerSpec, world: World) -> Stripe | None:
        """The stripe this rank owns, whose sum it re-encodes with a residual."""
        return stripes(codec, spec, world.size)[world.rank]

    def rounds(self, items: Sequence[LayerTask], world: World, buffer: Tensor | None) -> Rounds:
        """Scatter stripes, sum and re-encode one's own, gather them all; the owner too uses what the others decode."""
        parts, packings, incoming, room = yield from scatter(items, world)
        mine = packings[world.rank]
        gathered = room[: world.size * max(p.total for p in packings)]
        reply = own_row(gathered, world)
        for item, part, payloads, payload in zip(items, parts, incoming, mine.slices(reply), strict=True):
            mean = mean_of_stripe(item, part[world.rank], payloads, world)
            with item.meter.phase("compress"):
                seed = item.seeds.of(item.codec, world.rank, f"owner {world.rank}")
                memory = _owners(item, part[world.rank], world)
                item.encode(mean, payload, memory=memory, seed=seed)
        yield [AllGather(gathered, reply, [(item.meter, n) for item, n in zip(items, mine.lengths, strict=True)])]

        replies = [p.slices(row) for p, row in zip(packings, rows(gathered, world.size), strict=True)]
        for i, (item, part) in enumerate(zip(items, parts, strict=True)):
            with item.meter.phase("decompress"):
                for p, s in enumerate(part):
                    out = item.work_out(s)
                    seed = item.seeds.of(item.codec, p, f"owner {p}")
                    item.codec.decode(replies[p][i], out, add=False, scale=1.0, seed=seed)
                    item.finish(out, s)
                    item.vouch([replies[p][i]], s.spec)


def scatter(
    items: Sequence[LayerTask], world: World
) -> Generator[list[Collective], None, tuple[list[list[Stripe]], list[Packing], list[Tensor], Tensor]]:
    """The first half: every stripe to its owner.

    Returns:
        What travels of every layer's stripes; for every rank the payloads of what it owns; and for every layer all
        ranks' payloads of this rank's stripe, (P, length) uint8, for :func:`mean_of_stripe`. And the memory that all
        this was sent from, which is free now: uint8, with room for as much from each rank as any of them owns.
    """
    device, arena = items[0].grad.device, items[0].arena
    layers = tuple((i.codec, i.spec, i.part) for i in items)
    parts, packings = arena.known((layers, world), lambda: _layout(layers, world.size))
    mine = packings[world.rank]
    splits = [p.total for p in packings]

    room = arena.bytes(max(sum(splits), world.size * max(splits)), device)
    send = room[: sum(splits)]
    outgoing = [
        p.slices(send[a:b]) for p, (a, b) in zip(packings, pairwise(accumulate(splits, initial=0)), strict=True)
    ]
    for i, (item, part) in enumerate(zip(items, parts, strict=True)):
        with item.meter.phase("compress"):
            for p, s in enumerate(part):
                seed = item.seeds.of(item.codec, world.rank, f"stripe {p}")
                memory = item.memory.rows(s.start, s.stop)
                item.encode(item.work_grad(s), outgoing[p][i], memory=memory, seed=seed)
    received = arena.bytes(world.size * mine.total, device)
    shares = [(item.meter, sum(p.lengths[i] for p in packings)) for i, item in enumerate(items)]
    yield [AllToAll(received, send, [mine.total] * world.size, splits, world.rank, shares)]
    return parts, packings, mine.columns(received, world.size), room


_Layer = tuple[Compressor, LayerSpec, ChunkIndex]


def _layout(layers: Sequence[_Layer], world: int) -> tuple[list[list[Stripe]], list[Packing]]:
    """Stripes of every layer that travel; and for every rank the payloads, one a layer, of those that it owns."""
    parts = [[_part(codec, stripe, which) for stripe in stripes(codec, spec, world)] for codec, spec, which in layers]
    owners = [
        [codec.nbytes(stripe.spec) for (codec, *_), stripe in zip(layers, own, strict=True)]
        for own in zip(*parts, strict=True)
    ]
    return parts, [Packing(lengths) for lengths in owners]


def _part(codec: Compressor, stripe: Stripe, which: ChunkIndex) -> Stripe:
    """A part of a layer has its part of every stripe: so every rank owns some of it, and stripes stay what they are."""
    if which == WHOLE:
        return stripe
    part = which.of(codec, stripe.spec)
    return Stripe(stripe.start + part.start, stripe.start + part.stop, part.spec)


def _owners(item: LayerTask, part: Stripe, world: World) -> Memory:
    """The owner's slots for what travels of its stripe."""
    if item.part == WHOLE:
        return item.owner
    first = stripes(item.codec, item.spec, world.size)[world.rank].start
    return item.owner.rows(part.start - first, part.stop - first)


def mean_of_stripe(item: LayerTask, stripe: Stripe, payloads: Tensor, world: World) -> Tensor:
    """The mean over ranks of this rank's stripe, decoded in rank order."""
    with item.meter.phase("decompress"):
        dtype = item.spec.dtype if item.codec.lossless else torch.float32
        mean = scratch("mean", stripe.spec.shape, dtype, item.grad.device)
        seeds = [item.seeds.of(item.codec, p, f"stripe {world.rank}") for p in range(world.size)]
        item.codec.decode_sum(payloads, mean, scale=1 / world.size, seeds=seeds)
        return mean
