"""``gather``: everyone gets everyone's payload and decodes them all, in rank order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.base import Exchange
from commlib.exchange.buffers import Packing
from commlib.exchange.collectives import AllGather, Rounds
from commlib.exchange.layer_task import LayerTask, payers
from commlib.groups.world import World


class GatherExchange(Exchange):
    """All-gather of payloads, which every rank decodes and sums in rank order."""

    name = "gather"
    ROUNDS = 1

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Bytes a rank sends a step."""
        return (world - 1) * codec.nbytes(spec)

    def rounds(self, items: Sequence[LayerTask], world: World, buffer: Tensor | None) -> Rounds:
        """Compress, all-gather, sum the decoded payloads: the same bytes in the same order everywhere."""
        items = [item.alone() for item in items]
        layers = tuple((i.codec, i.spec) for i in items)
        packing = items[0].arena.known(layers, lambda: Packing([codec.nbytes(spec) for codec, spec in layers]))
        device = items[0].grad.device
        gathered, payload = items[0].arena.gathered(packing.total, world, device)
        for item, part in zip(items, packing.slices(payload), strict=True):
            with item.meter.phase("compress"):
                seed = item.seeds.of(item.codec, world.rank)
                item.encode(item.work_grad(), part, memory=item.memory, seed=seed)
        yield [AllGather(gathered, payload, payers(items, packing.lengths))]
        for item, payloads in zip(items, packing.columns(gathered, world.size), strict=True):
            with item.meter.phase("decompress"):
                out = item.work_out()
                seeds = [item.seeds.of(item.codec, rank) for rank in range(world.size)]
                item.codec.decode_sum(payloads, out, scale=1 / world.size, seeds=seeds)
                item.finish(out)
                item.vouch(payloads, item.spec)
