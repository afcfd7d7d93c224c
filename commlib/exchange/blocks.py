"""``blocks``: two all-reduces: how large what is held of every block is, then the blocks that all ranks choose alike.

The importance order and the bound of staleness of managed communication (Wei et al., SoCC 2015, "Managed
communication and consistency for fast data-parallel iterative analytics", the manager of Bösen).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlib.blocks import clear, magnitudes, poison, spread, take
from commlib.collective import AllReduce, Rounds
from commlib.compressor import Blockwise, Compressor, LayerSpec
from commlib.exchange.item import Item, Stripe, World, payers

ROUNDS = 2


def refuse(codec: Compressor, spec: LayerSpec) -> str | None:
    """Only codecs that choose blocks."""
    if not isinstance(codec, Blockwise):
        return "it does not choose blocks (blocks does)"
    return None


def wire_bytes(codec: Compressor, spec: LayerSpec, world: int) -> float:
    """Bytes a rank sends a step, the same in every step: one float32 a block, and the blocks that go."""
    found = _require(codec)
    values = found.blocks(spec) + found.count(spec) * found.length(spec)
    return 2 * (world - 1) / world * 4 * values


def owned(codec: Compressor, spec: LayerSpec, world: World) -> Stripe | None:
    """No rank owns a part."""
    return None


def rounds(items: Sequence[Item], world: World, buffer: torch.Tensor | None) -> Rounds:
    """Sum the sizes of what is held; choose; sum what is chosen. What is not stays in the residual.

    The sizes are exchanged in every order, fifo and random too: so a value that is not finite is heard of on every
    rank in its own step, chosen or not.
    """
    codecs = [_require(item.codec) for item in items]
    flats, sizes = [], []
    for item, codec in zip(items, codecs, strict=True):
        with item.meter.phase("compress"):
            held = torch.add(item.work_grad(), item.memory.old["residual"], out=item.memory.new["residual"])
            flats.append(held.view(-1))
            # Halved, and a mean: so that a sum of finite sizes is finite.
            sizes.append(magnitudes(flats[-1], codec.length(item.spec)) / (2 * world.size))
    total = torch.cat(sizes)
    yield [AllReduce(total, payers(items, [s.nbytes for s in sizes]))]

    heard = torch.split(total, [len(s) for s in sizes])
    chosen, parts = [], []
    for item, codec, flat, size in zip(items, codecs, flats, heard, strict=True):
        with item.meter.phase("compress"):
            length = codec.length(item.spec)
            chosen.append(codec.choose(size, item.memory, item.seeds.of(codec, world.rank)))
            parts.append(take(flat, length, chosen[-1]).view(-1))
            clear(flat, length, chosen[-1])  # flat *is* the new residual
    sent = torch.cat(parts).div_(world.size)
    yield [AllReduce(sent, payers(items, [p.nbytes for p in parts]))]

    come = torch.split(sent, [len(p) for p in parts])
    for item, codec, size, which, values in zip(items, codecs, heard, chosen, come, strict=True):
        with item.meter.phase("decompress"):
            out, length = item.work_out(), codec.length(item.spec)
            spread(values.view(-1, length) + poison(size), out.view(-1), length, which)
            item.finish(out)


def _require(codec: Compressor) -> Blockwise:
    if not isinstance(codec, Blockwise):
        raise ValueError(f"{codec}: {refuse(codec, LayerSpec('layer', (8, 8)))}")
    return codec
