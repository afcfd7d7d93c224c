"""``dense``: an all-reduce, of the gradients themselves or of payloads that may be summed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.base import Exchange
from commlib.exchange.buffers import ALIGN, Packing
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
        sums = []
        for dtype, group in by_dtype.items():
            alone = len(group) == 1 and InPlace.fits(group[0])
            payloads = InPlace(group[0]) if alone else SideBySide(group)
            payloads.encode(world)
            summed = payloads.buffer.view(dtype).div_(world.size)
            sums.append((payloads, AllReduce(summed, payloads.shares)))
        yield [reduce for _, reduce in sums]
        for payloads, _ in sums:
            payloads.decode(world)


class SideBySide:
    """Payloads of several layers, in a buffer that is kept from step to step.

    Args:
        items: the layers.
    """

    def __init__(self, items: Sequence[LayerTask]) -> None:
        self._items = items
        packing = Packing([i.codec.nbytes(i.spec) for i in items])
        room = items[0].arena.bytes(packing.total, items[0].grad.device)
        self.buffer = room[: packing.offsets[-1] + packing.lengths[-1]]  # of one layer as many bytes as in place
        self.shares = payers(items, packing.lengths)
        self._parts = packing.slices(self.buffer)

    def encode(self, world: World) -> None:
        """Compress every layer into its part of the buffer."""
        for item, part in zip(self._items, self._parts, strict=True):
            with item.meter.phase("compress"):
                item.encode(item.work_grad(), part, memory=item.memory, seed=item.seeds.of(item.codec, world.rank))

    def decode(self, world: World) -> None:
        """Decompress what the buffer has come to."""
        for item, part in zip(self._items, self._parts, strict=True):
            with item.meter.phase("decompress"):
                out = item.work_out()
                seed = item.seeds.of(item.codec, world.rank)
                item.codec.decode(part, out, add=False, scale=1.0, seed=seed)
                item.finish(out)


class InPlace:
    """Payload of one layer in the first half of its gradient's own memory, so that hardly any other is needed.

    Values are coded in blocks, each as long as all before it together: values a to 2a lie behind what they become. Only
    the first block needs room of its own for that. They are decoded in the opposite order.

    Args:
        item: the layer, of which :meth:`fits` says that it may be.
    """

    FIRST = 64 << 10
    """Values of the first block."""

    def __init__(self, item: LayerTask) -> None:
        grad, n = item.grad.view(-1), item.spec.numel
        self._item, self._grad, self._width = item, grad, item.codec.nbytes(item.spec) // n
        self._memory = item.memory.flat()
        ends = [0, self.FIRST]
        while ends[-1] < n:
            ends.append(min(n, 2 * ends[-1]))
        self._blocks = list(pairwise(ends))
        self.buffer = grad.view(torch.uint8)[: n * self._width]
        self.shares = payers([item], [len(self.buffer)])
        self._first = item.arena.bytes(self.FIRST * self._width, grad.device)

    @classmethod
    def fits(cls, item: LayerTask) -> bool:
        """Whether a layer's payload may lie there: it is at most half as long, made value by value, and aligned."""
        n, grad, length = item.spec.numel, item.grad, item.codec.nbytes(item.spec)
        if n < 2 * cls.FIRST or not (item.codec.elementwise and item.overwrite) or grad.dtype != torch.float32:
            return False
        return length % n == 0 and 2 * length <= grad.nbytes and grad.storage_offset() * grad.itemsize % ALIGN == 0

    def encode(self, world: World) -> None:
        """Compress the gradient, which is overwritten."""
        item, seed = self._item, self._item.seeds.of(self._item.codec, world.rank)
        with item.meter.phase("compress"):
            for a, b in self._blocks:
                into = self._payload(a, b) if a else self._first
                item.encode(self._grad[a:b], into, memory=self._memory.rows(a, b), seed=seed, first=a)
                if not a:
                    self._payload(a, b).copy_(into)

    def decode(self, world: World) -> None:
        """Decompress what the payload has come to."""
        item, seed = self._item, self._item.seeds.of(self._item.codec, world.rank)
        with item.meter.phase("decompress"):
            for a, b in reversed(self._blocks):
                source = self._payload(a, b) if a else self._first.copy_(self._payload(a, b))
                item.codec.decode(source, self._grad[a:b], add=False, scale=1.0, seed=seed)

    def _payload(self, a: int, b: int) -> Tensor:
        return self.buffer[a * self._width : b * self._width]


def mean(buffer: Tensor, world: World, payers: Payers) -> AllReduce:
    """All-reduce that makes a bucket that is plain altogether its mean; its values are scaled here and now."""
    buffer.mul_(1 / world.size)  # DDP's own operation: a division rounds differently
    return AllReduce(buffer, payers)
