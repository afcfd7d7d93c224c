"""``blocks``: the most important blocks of a layer, and none is held longer than so many steps (Wei et al. 2015)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commlib.codecs.base import LayerSpec, Memory, Slot, store
from commlib.codecs.cooperative import Blockwise, clear, magnitudes, poison, spread, take
from commlib.compressors.base.sparse import check_ratio, kept
from commlib.runtime.scratch import scratch

_ORDERS = ("magnitude", "fifo", "random")


@dataclasses.dataclass(frozen=True)
class Blocks(Blockwise):
    """A layer in blocks: in each step those go that were held ``staleness`` steps; then others, up to ``keep``.

    What is not sent is added to what comes, and nothing is lost. Every block goes once in staleness + 1 steps at least,
    so no less than 1/(staleness + 1) of the layer goes in a step: with a smaller ``keep`` all are sent in turn, and
    ``order`` has nothing to decide. The number of blocks is the same in every step, because first ages are spread:
    m blocks that went together fall due together, or fewer.

    Payload: places (int64), then blocks (float32), the last one filled up with zeros.

    Args:
        keep: share of the blocks that goes in a step, in (0, 1].
        staleness: steps a block may be held, ≥ 1.
        order: ``magnitude``, the largest root mean square first; ``fifo``, the longest held; ``random``.
        block: values in a block; a smaller layer is one.
    """

    keep: float = 0.1
    staleness: int = 20
    order: str = "magnitude"
    block: int = 1024

    name = "blocks"
    default_exchange = "blocks"

    def __post_init__(self) -> None:
        check_ratio(self.name, self.keep)
        for what, value in (("staleness", self.staleness), ("block", self.block)):
            if value < 1:
                raise ValueError(f"blocks: {what} must be at least 1, got {value}")
        if self.order not in _ORDERS:
            raise ValueError(f"blocks: order must be one of {', '.join(_ORDERS)}, got {self.order!r}")
        for attr in ("random", "shared_seed"):
            object.__setattr__(self, attr, self.order == "random")

    def length(self, spec: LayerSpec) -> int:
        return max(1, min(self.block, spec.numel))

    def count(self, spec: LayerSpec) -> int:
        return self._share(self.blocks(spec))

    def slots(self, spec: LayerSpec) -> dict[str, Slot]:
        return {"residual": Slot(spec.shape), "ages": Slot((self.blocks(spec),), "replicated")}

    def nbytes(self, spec: LayerSpec) -> int:
        return self.count(spec) * (8 + 4 * self.length(spec))

    def choose(self, sizes: Tensor, memory: Memory, seed: int, out: Tensor) -> None:
        # "ages" starts at zero, so it holds the difference to the first age, by which blocks take turns.
        blocks, device = len(sizes), sizes.device
        first, held = (scratch(what, (blocks,), torch.float32, device) for what in ("first", "held"))
        torch.arange(blocks, out=first).remainder_(self.staleness + 1)
        torch.add(memory.old["ages"], first, out=held).clamp_(min=0)
        choice(self._importance(sizes, held, seed), held, self.staleness, out)
        held.add_(1).index_fill_(0, out, 0)
        torch.sub(held, first, out=memory.new["ages"])

    def _share(self, blocks: int) -> int:
        return max(kept(self.keep, blocks), -(-blocks // (self.staleness + 1))) if blocks else 0

    def _importance(self, sizes: Tensor, held: Tensor, seed: int) -> Tensor:
        if self.order == "random":
            drawn = scratch("drawn", (len(sizes),), torch.float32, torch.device("cpu"))
            return torch.rand(len(sizes), generator=torch.Generator().manual_seed(seed), out=drawn).to(sizes.device)
        return held if self.order == "fifo" else sizes

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        length, count = self.length(LayerSpec.of(x)), self.blocks(LayerSpec.of(x))
        flat = torch.add(x, memory.old["residual"], out=memory.new["residual"]).view(-1)
        sizes = scratch("sizes", (count,), torch.float32, x.device)
        magnitudes(flat, length, sizes)
        places, values = self._parts(payload, length)
        self.choose(sizes, memory, seed, places)
        take(flat, length, places, values)
        values += poison(sizes)
        clear(flat, length, places)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        places, values = self._parts(payload, self.length(LayerSpec.of(out)))
        whole = scratch("decoded", (out.numel(),), out.dtype, out.device)
        spread(values, whole, values.shape[1], places)
        store(whole, out.view(-1), add=add, scale=scale)

    def _parts(self, payload: Tensor, length: int) -> tuple[Tensor, Tensor]:
        count = len(payload) // (8 + 4 * length)
        return payload[: 8 * count].view(torch.int64), payload[8 * count :].view(torch.float32).view(count, length)


def choice(importance: Tensor, held: Tensor, staleness: int, out: Tensor) -> None:
    """Which blocks go: those that are due, the longest held first, then the most important; ascending. Pure.

    Args:
        importance: (blocks,); ties go to the first block.
        held: steps each was held, (blocks,).
        staleness: a block held for so many is due.
        out: (count,) int64: how many go, if there are so many.
    """
    device, (blocks,) = held.device, held.shape
    keys, due, ordered = (scratch(what, (blocks,), torch.float32, device) for what in ("keys", "due", "ordered"))
    order, again, both = (scratch(what, (blocks,), torch.int64, device) for what in ("order", "again", "both"))
    torch.sort(importance, descending=True, stable=True, out=(keys, order))
    early = torch.lt(held, staleness, out=scratch("early", (blocks,), torch.bool, device))
    due.copy_(held).masked_fill_(early, -1.0)
    torch.index_select(due, 0, order, out=ordered)
    torch.sort(ordered, descending=True, stable=True, out=(keys, again))
    torch.index_select(order, 0, again, out=both)
    torch.sort(both[: len(out)], out=(out, again[: len(out)]))
