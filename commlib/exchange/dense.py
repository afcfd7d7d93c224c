"""``dense``: an all-reduce, of the gradients themselves or of payloads that may be summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.base import Exchange
from commlib.exchange.buffers import Packing
from commlib.exchange.collectives import AllReduce, Payers, Rounds
from commlib.exchange.layer_task import LayerTask, payers
from commlib.groups.world import World


class DenseExchange(Exchange):
    """All-reduce of a bucket, in one round: of gradients, or of payloads that may be summed."""

    name = "dense"
    ROUNDS = 1

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """Only payloads that add up element by element can be all-reduced."""
        if codec.reduce_dtype(spec) is None:
            return "its payloads cannot be summed by an all-reduce; use gather or scatter_gather"
        return None

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Bytes a rank sends a step."""
        return 2 * (world - 1) / world * codec.nbytes(spec)

    def rounds(self, items: Sequence[LayerTask], world: World, buffer: Tensor | None) -> Rounds:
        """Divide by P, all-reduce, decode.

        Divided *before* the sum, as DDP does: so the result is DDP's to the last bit where a whole
        bucket is uncompressed (``buffer``: it is then reduced in place, without a copy).
        """
        if buffer is not None and all(item.codec.lossless and not item.memory.old for item in items):
            yield [mean(buffer, world, payers(items, [item.spec.nbytes for item in items]))]
            return
        by_dtype: dict[torch.dtype, list[LayerTask]] = {}
        for item in (each.alone() for each in items):
            dtype = item.codec.reduce_dtype(item.spec)
            if dtype is None:
                raise ValueError(f"{item.codec} cannot be all-reduced")  # refuse() has been passed over
            by_dtype.setdefault(dtype, []).append(item)
        packed = []
        for dtype, group in by_dtype.items():
            packing = Packing([i.codec.nbytes(i.spec) for i in group])
            payload = group[0].arena.bytes(packing.total, group[0].grad.device)
            for item, part in zip(group, packing.slices(payload), strict=True):
                with item.meter.phase("compress"):
                    seed = item.seeds.of(item.codec, world.rank)
                    item.encode(item.work_grad(), part, memory=item.memory, seed=seed)
            payload.view(dtype).div_(world.size)
            packed.append((group, packing, payload, dtype))
        yield [AllReduce(p.view(dt), payers(g, packing.lengths)) for g, packing, p, dt in packed]
        for group, packing, payload, _ in packed:
            for item, part in zip(group, packing.slices(payload), strict=True):
                with item.meter.phase("decompress"):
                    out = item.work_out()
                    seed = item.seeds.of(item.codec, world.rank)
                    item.codec.decode(part, out, add=False, scale=1.0, seed=seed)
                    item.finish(out)


def mean(buffer: Tensor, world: World, payers: Payers) -> AllReduce:
    """All-reduce that makes a bucket that is plain altogether its mean; its values are scaled here and now."""
    buffer.mul_(1 / world.size)  # DDP's own operation: a division rounds differently
    return AllReduce(buffer, payers)
