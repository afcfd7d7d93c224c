"""``blocks``: two all-reduces: how large what is held of every block is, then the blocks that all ranks choose alike.

The importance order and the bound of staleness of managed communication (Wei et al., SoCC 2015, "Managed
communication and consistency for fast data-parallel iterative analytics", the manager of Bösen).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.codecs.cooperative import Blockwise, clear, magnitudes, poison, spread, take
from commlib.exchange.base import Exchange
from commlib.exchange.buffers import StepBuffers
from commlib.exchange.collectives import AllReduce, Rounds
from commlib.exchange.layer_task import LayerTask, payers
from commlib.groups.world import World


class BlocksExchange(Exchange):
    """Choice of the same blocks on all ranks, and all-reduce of those."""

    name = "blocks"
    ROUNDS = 2

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """Only codecs that choose blocks."""
        if not isinstance(codec, Blockwise):
            return "it does not choose blocks (blocks does)"
        return None

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Bytes a rank sends a step, the same in every step: one float32 a block, and the blocks that go."""
        found = _require(codec)
        values = found.blocks(spec) + found.count(spec) * found.length(spec)
        return 2 * (world - 1) / world * 4 * values

    def rounds(self, items: Sequence[LayerTask], world: World, buffer: Tensor | None) -> Rounds:
        """Sum the sizes of what is held; choose; sum what is chosen. What is not stays in the residual.

        The sizes are exchanged in every order, fifo and random too: so a value that is not finite is heard of on every
        rank in its own step, chosen or not.
        """
        codecs = [_require(item.codec) for item in items]
        arena, device = items[0].arena, items[0].grad.device
        lengths = [codec.length(item.spec) for item, codec in zip(items, codecs, strict=True)]
        total, sizes = _side_by_side(
            [codec.blocks(i.spec) for i, codec in zip(items, codecs, strict=True)], arena, device
        )
        flats = []
        for item, length, size in zip(items, lengths, sizes, strict=True):
            with item.meter.phase("compress"):
                held = torch.add(item.work_grad(), item.memory.old["residual"], out=item.memory.new["residual"])
                flats.append(held.view(-1))
                magnitudes(flats[-1], length, size)
        total /= 2 * world.size  # halved, and a mean: so that a sum of finite sizes is finite
        yield [AllReduce(total, payers(items, [s.nbytes for s in sizes]))]

        counts = [codec.count(item.spec) for item, codec in zip(items, codecs, strict=True)]
        sent, parts = _side_by_side([n * length for n, length in zip(counts, lengths, strict=True)], arena, device)
        chosen = [arena.empty((n,), torch.int64, device) for n in counts]
        for item, codec, flat, size, length, which, part in zip(
            items, codecs, flats, sizes, lengths, chosen, parts, strict=True
        ):
            with item.meter.phase("compress"):
                codec.choose(size, item.memory, item.seeds.of(codec, world.rank), which)
                take(flat, length, which, part.view(-1, length))
                clear(flat, length, which)  # flat *is* the new residual
        sent /= world.size
        yield [AllReduce(sent, payers(items, [p.nbytes for p in parts]))]

        for item, size, length, which, part in zip(items, sizes, lengths, chosen, parts, strict=True):
            with item.meter.phase("decompress"):
                out = item.work_out()
                part += poison(size)
                spread(part.view(-1, length), out.view(-1), length, which)
                item.finish(out)


def _side_by_side(lengths: Sequence[int], arena: StepBuffers, device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
    """Float32 vectors as one, and as views of it."""
    whole = arena.empty((sum(lengths),), torch.float32, device)
    return whole, torch.split(whole, list(lengths))


def _require(codec: Compressor) -> Blockwise:
    if not isinstance(codec, Blockwise):
        raise ValueError(f"{codec}: {BlocksExchange().refuse(codec, LayerSpec('layer', (8, 8)))}")
    return codec
