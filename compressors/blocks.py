"""``blocks``: the most important blocks of a layer, and none is held longer than so many steps (Wei et al. 2015)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commlib.blocks import clear, magnitudes, poison, spread, take
from commlib.compressor import Blockwise, LayerSpec, Memory, Slot, store
from commlib.compressors.sparse import check_ratio, kept

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

    def choose(self, sizes: Tensor, memory: Memory, seed: int) -> Tensor:
        # "ages" starts at zero, so it holds the difference to the first age, by which blocks take turns.
        first = torch.arange(len(sizes), device=sizes.device, dtype=torch.float32) % (self.staleness + 1)
        held = (memory.old["ages"] + first).clamp_(min=0)
        chosen = choice(self._importance(sizes, held, seed), held, self.staleness, self._share(len(sizes)))
        later = held + 1
        later[chosen] = 0
        torch.sub(later, first, out=memory.new["ages"])
        return chosen

    def _share(self, blocks: int) -> int:
        return max(kept(self.keep, blocks), -(-blocks // (self.staleness + 1))) if blocks else 0

    def _importance(self, sizes: Tensor, held: Tensor, seed: int) -> Tensor:
        if self.order == "random":
            return torch.rand(len(sizes), generator=torch.Generator().manual_seed(seed)).to(sizes.device)
        return held if self.order == "fifo" else sizes

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        length = self.length(LayerSpec.of(x))
        flat = torch.add(x, memory.old["residual"], out=memory.new["residual"]).view(-1)
        sizes = magnitudes(flat, length)
        chosen = self.choose(sizes, memory, seed)
        places, values = self._parts(payload, length)
        places.copy_(chosen)
        values.copy_(take(flat, length, chosen) + poison(sizes))
        clear(flat, length, chosen)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        places, values = self._parts(payload, self.length(LayerSpec.of(out)))
        whole = torch.empty_like(out).view(-1)
        spread(values, whole, values.shape[1], places)
        store(whole, out, add=add, scale=scale)

    def _parts(self, payload: Tensor, length: int) -> tuple[Tensor, Tensor]:
        count = len(payload) // (8 + 4 * length)
        return payload[: 8 * count].view(torch.int64), payload[8 * count :].view(torch.float32).view(count, length)


def choice(importance: Tensor, held: Tensor, staleness: int, count: int) -> Tensor:
    """Which blocks go: those that are due, the longest held first, then the most important; ascending, int64. Pure.

    Args:
        importance: (blocks,); ties go to the first block.
        held: steps each was held, (blocks,).
        staleness: a block held for so many is due.
        count: how many go, if there are so many.
    """
    order = torch.argsort(importance, descending=True, stable=True)
    due = torch.where(held >= staleness, held, -1.0)[order]
    order = order[torch.argsort(due, descending=True, stable=True)]
    return order[:count].sort().values
