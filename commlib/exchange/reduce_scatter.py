"""``reduce_scatter``: every stripe of a gradient to the rank that owns it, which adds up; nothing comes back.

For models whose parameters are shared out over the ranks (FSDP2). The stripes are the model's own: as many rows as
``torch.chunk`` gives to each rank, the last ones fewer or none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.base import Carrier
from commlib.exchange.buffers import Packing
from commlib.exchange.collectives import AllToAll, Rounds
from commlib.exchange.layer_task import LayerTask, Stripe, payers
from commlib.groups.world import World
from commlib.runtime.scratch import scratch


@functools.lru_cache(maxsize=4096)  # every step asks the same of every layer
def chunks(spec: LayerSpec, world: int) -> tuple[Stripe, ...]:
    """The rows of a layer that each rank owns: ``torch.chunk``'s, with empty ones where that gives fewer."""
    height = spec.shape[0]
    length = -(-height // world)
    cuts = [min(height, rank * length) for rank in range(world + 1)]
    return tuple(Stripe(a, b, spec.row_slice(a, b)) for a, b in pairwise(cuts))


class ReduceScatter(Carrier):
    """Reduce-scatter for FSDP2: every rank gets its own part of the mean only."""

    name = "reduce_scatter"
    ROUNDS = 1
    PASSES = 1

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """Stripes are coded one by one, so what a codec remembers must be rows of the layer, too."""
        if not spec.shape:
            return "a scalar has no rows to share out"
        odd = [key for key, slot in codec.slots(spec).items() if slot.shape != spec.shape or slot.role == "replicated"]
        if odd:
            return f"its {', '.join(odd)} cannot be shared out by rows, as the parameters of a sharded model are"
        return None

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Bytes the busiest rank sends a step."""
        lengths = [codec.nbytes(s.spec) for s in chunks(spec, world)]
        return sum(lengths) - min(lengths)

    def rounds(self, items: Sequence[LayerTask], table: Tensor, out: Tensor, world: World, scale: float) -> Rounds:
        """Fills ``out`` with ``scale`` times the sum over ranks of this rank's chunks, decoded and added in rank order.

        Args:
            items: the layers; their ``grad`` is not looked at.
            table: (P, n) of the gradients' dtype; not modified.
            out: (n,) of the same.
            world: this rank.
            scale: 1/P for the mean.
        """
        arena, device = items[0].arena, table.device
        layers = tuple((item.codec, item.spec) for item in items)
        row, packings = arena.known((layers, world), lambda: _layout(layers, world.size))
        splits = [p.total for p in packings]
        send = arena.bytes(sum(splits), device)
        parts = [p.slices(part) for p, part in zip(packings, torch.split(send, splits), strict=True)]
        for i, (item, start) in enumerate(zip(items, row.starts, strict=True)):
            with item.meter.phase("compress"):
                for p, stripe in enumerate(chunks(item.spec, world.size)):
                    x = table[p, start : start + stripe.spec.numel].view(stripe.spec.shape)
                    memory = item.memory.rows(stripe.start, stripe.stop)
                    seed = item.seeds.of(item.codec, world.rank, f"stripe {p}")
                    item.encode(_work(item, x), parts[p][i], memory=memory, seed=seed)
        mine = packings[world.rank]
        received = arena.bytes(world.size * mine.total, device)
        shares = payers(items, [sum(p.lengths[i] for p in packings) for i in range(len(items))])
        yield [AllToAll(received, send, [mine.total] * world.size, splits, world.rank, shares)]

        out.zero_()  # what pads chunks is nobody's, but is looked at with the rest
        for item, start, payloads in zip(items, row.starts, mine.columns(received, world.size), strict=True):
            with item.meter.phase("decompress"):
                stripe = chunks(item.spec, world.size)[world.rank]
                found = out[start : start + stripe.spec.numel].view(stripe.spec.shape)
                values = _room(item, found)
                seeds = [item.seeds.of(item.codec, p, f"stripe {world.rank}") for p in range(world.size)]
                item.codec.decode_sum(payloads, values, scale=scale, seeds=seeds)
                if values is not found:
                    found.copy_(values)


@dataclasses.dataclass(frozen=True)
class ReduceScatterLayout:
    """Where layers are in what FSDP2 hands over: one row a rank, in it the padded chunks of all layers one by one.

    Attributes:
        starts: of every layer in a row, in values.
        length: of a row, in values.
    """

    starts: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, specs: Sequence[LayerSpec], world: int) -> ReduceScatterLayout:
        """Make the layout of these layers, in this order."""
        ends = list(accumulate((chunks(spec, world)[0].spec.numel for spec in specs), initial=0))
        return cls(tuple(ends[:-1]), ends[-1])


def _layout(layers: Sequence[tuple[Compressor, LayerSpec]], world: int) -> tuple[ReduceScatterLayout, list[Packing]]:
    stripes = [[(codec, chunks(spec, world)[rank].spec) for codec, spec in layers] for rank in range(world)]
    return ReduceScatterLayout.of([spec for _, spec in layers], world), [
        Packing([c.nbytes(s) for c, s in row]) for row in stripes
    ]


def _work(item: LayerTask, x: Tensor) -> Tensor:
    """Values in the dtype that the codec works on."""
    return x if x.dtype == torch.float32 or item.codec.lossless else _room(item, x).copy_(x)


def _room(item: LayerTask, like: Tensor) -> Tensor:
    """Itself, or float32 of its shape."""
    if like.dtype == torch.float32 or item.codec.lossless:
        return like
    return scratch("chunk", like.shape, torch.float32, like.device)
