"""``scatter_gather``: every rank owns a stripe, sums it, and sends the sum compressed again.

The aggregation of CNTK's 1-bit SGD (Seide et al. 2014): 2(P−1)/P payloads sent instead of gather's P−1,
for a second quantisation with a residual of its own. Stripes are cut *per layer*, along dimension 0 and at
the codec's boundaries, never per bucket: so residuals do not depend on how DDP fills its buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from commlib.collective import AllGather, AllToAll, Rounds
from commlib.compressor import Compressor, LayerSpec
from commlib.exchange.item import Item, Packing, Stripe, World, rows
from commlib.scratch import scratch

ROUNDS = 2


def stripes(codec: Compressor, spec: LayerSpec, world: int) -> list[Stripe]:
    """One contiguous stripe a rank; what does not divide goes to the low ranks, some may be empty.

    A scalar is one row.
    """
    spec = spec if spec.shape else dataclasses.replace(spec, shape=(1,))
    height, unit = spec.shape[0], codec.stripe_rows(spec)
    units = -(-height // unit)
    cuts = [min(height, unit * (units // world * p + min(p, units % world))) for p in range(world + 1)]
    return [Stripe(a, b, spec.row_slice(a, b)) for a, b in pairwise(cuts)]


def refuse(codec: Compressor, spec: LayerSpec) -> str | None:
    """The owner re-encodes a sum, so the codec may remember nothing but what error feedback adds to it."""
    if not spec.shape:
        return "a scalar has no rows to share out; use gather"
    kept = set(codec.slots(spec))
    if kept and not (kept == {"residual"} and codec.is_feedback):
        return f"it keeps its own {', '.join(sorted(kept))} per worker and cannot re-encode a sum; use gather"
    return None


def wire_bytes(codec: Compressor, spec: LayerSpec, world: int) -> float:
    """Bytes the busiest rank sends a step."""
    lengths = [codec.nbytes(s.spec) for s in stripes(codec, spec, world)]
    return sum(lengths) - min(lengths) + (world - 1) * max(lengths)


def owned(codec: Compressor, spec: LayerSpec, world: World) -> Stripe | None:
    """The stripe this rank owns, whose sum it re-encodes with a residual."""
    return stripes(codec, spec, world.size)[world.rank]


def rounds(items: Sequence[Item], world: World, buffer: Tensor | None) -> Rounds:
    """Scatter stripes, sum and re-encode one's own, gather them all; the owner too uses what the others decode."""
    device, arena = items[0].grad.device, items[0].arena
    layers = tuple((i.codec, i.spec) for i in items)
    cut, packings = arena.known((layers, world), lambda: _layout(layers, world.size))
    mine = packings[world.rank]
    splits = [p.total for p in packings]

    send = arena.bytes(sum(splits), device)
    outgoing = [
        p.slices(send[a:b]) for p, (a, b) in zip(packings, pairwise(accumulate(splits, initial=0)), strict=True)
    ]
    for i, (item, c) in enumerate(zip(items, cut, strict=True)):
        with item.meter.phase("compress"):
            grad = item.work_grad()
            for p, s in enumerate(c):
                seed = item.seeds.of(item.codec, world.rank, f"stripe {p}")
                memory = item.memory.rows(s.start, s.stop)
                item.codec.compress(grad[s.start : s.stop], outgoing[p][i], memory=memory, seed=seed)
    received = arena.bytes(world.size * mine.total, device)
    shares = [(item.meter, sum(p.lengths[i] for p in packings)) for i, item in enumerate(items)]
    yield [AllToAll(received, send, [mine.total] * world.size, splits, world.rank, shares)]

    incoming = mine.columns(received, world.size)
    reply = arena.bytes(max(splits), device)
    for i, (item, c) in enumerate(zip(items, cut, strict=True)):
        mean = _mean_of_stripe(item, c[world.rank], incoming[i], world)
        with item.meter.phase("compress"):
            seed = item.seeds.of(item.codec, world.rank, f"owner {world.rank}")
            item.codec.compress(mean, mine.slices(reply)[i], memory=item.owner, seed=seed)
    gathered = arena.bytes(world.size * len(reply), device)
    yield [AllGather(gathered, reply, [(item.meter, n) for item, n in zip(items, mine.lengths, strict=True)])]

    replies = [p.slices(row) for p, row in zip(packings, rows(gathered, world.size), strict=True)]
    for i, (item, c) in enumerate(zip(items, cut, strict=True)):
        with item.meter.phase("decompress"):
            out = item.work_out()
            for p, s in enumerate(c):
                seed = item.seeds.of(item.codec, p, f"owner {p}")
                item.codec.decompress(replies[p][i], out[s.start : s.stop], seed=seed)
            item.finish(out)


def _layout(layers: Sequence[tuple[Compressor, LayerSpec]], world: int) -> tuple[list[list[Stripe]], list[Packing]]:
    """The stripes of every layer; and for every rank the payloads, one a layer, of the stripes that it owns."""
    cut = [stripes(codec, spec, world) for codec, spec in layers]
    owners = [
        [codec.nbytes(stripe.spec) for (codec, _), stripe in zip(layers, own, strict=True)]
        for own in zip(*cut, strict=True)
    ]
    return cut, [Packing(lengths) for lengths in owners]


def _mean_of_stripe(item: Item, stripe: Stripe, payloads: Tensor, world: World) -> Tensor:
    """The mean over ranks of this rank's stripe, decoded in rank order."""
    with item.meter.phase("decompress"):
        dtype = item.spec.dtype if item.codec.lossless else torch.float32
        mean = scratch("mean", stripe.spec.shape, dtype, item.grad.device)
        seeds = [item.seeds.of(item.codec, p, f"stripe {world.rank}") for p in range(world.size)]
        item.codec.decompress_sum(payloads, mean, scale=1 / world.size, seeds=seeds)
        return mean
