"""``twobit``: a sign and one of two magnitudes, for values that were chosen because they are large."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory, store
from commlib.compressors.base.fused import rows_of_blocks
from commlib.compressors.kernels.reference.bitpack import fields_nbytes, pack_fields, unpack_fields

_LARGEST = torch.finfo(torch.float32).max


@dataclasses.dataclass(frozen=True)
class TwoBit(Compressor):
    """Each value becomes ± the mean of the magnitudes on its side of their mean in its block.

    As ``values=`` of ``topk`` this is SparseLoCo's kind of message (arXiv 2508.15706 has 2 bits a value; its levels are
    not published there, these are one step of Lloyd's from a sign and a mean).

    Payload: for each block of values two float32, the mean of those below the mean and of the others; then 2 bits a
    value: 1 if negative, + 2 if not below. Error: ‖v − Q‖² = ‖v‖² − (n₀m₀² + n₁m₁²) for a block, so δ = 1/block.

    Args:
        block: values that share two magnitudes.
    """

    block: int = 64

    name = "twobit"

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"twobit: block must be at least 1, got {self.block}")

    def nbytes(self, spec: LayerSpec) -> int:
        return self.scale_bytes(spec) + fields_nbytes(spec.numel, 2)

    def scale_bytes(self, spec: LayerSpec) -> int:
        return 8 * -(-spec.numel // self.block)

    def part_rows(self, spec: LayerSpec) -> int | None:
        return rows_of_blocks(spec, self.block)

    def contraction(self, spec: LayerSpec) -> float | None:
        return 1 / min(self.block, max(1, spec.numel))

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        flat, head = x.view(-1), self.scale_bytes(LayerSpec.of(x))
        if not flat.numel():
            return
        sizes = flat.new_zeros(head // 8, self.block)
        sizes.view(-1)[: flat.numel()] = flat.abs()
        lengths = sizes.new_full((len(sizes), 1), self.block)
        lengths[-1] = flat.numel() - (len(sizes) - 1) * self.block
        large = sizes >= _mean(sizes, lengths, lengths)
        means = payload[:head].view(torch.float32).view(-1, 2)
        count = large.sum(1, keepdim=True)
        means[:, :1] = _mean(sizes.masked_fill(large, 0), lengths, (lengths - count).clamp(min=1))
        means[:, 1:] = _mean(sizes.masked_fill(~large, 0), lengths, count.clamp(min=1))
        codes = large.view(-1)[: flat.numel()].to(torch.uint8) * 2 + (flat < 0)
        payload[head:] = pack_fields(codes, 2)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        n, head = out.numel(), self.scale_bytes(LayerSpec.of(out))
        codes = unpack_fields(payload[head:], n, 2).to(torch.int64)
        block = torch.arange(n, device=out.device) // self.block
        sizes = payload[:head].view(torch.float32)[2 * block + codes // 2]
        store(torch.where(codes % 2 == 1, -sizes, sizes), out, add=add, scale=scale)


def _mean(sizes: Tensor, lengths: Tensor, count: Tensor) -> Tensor:
    """Mean of ``count`` values of each row, (rows, 1), the others being zero; no sum on the way is too large."""
    share = (sizes / lengths).sum(1, keepdim=True).clamp(max=_LARGEST)
    mean = share * (lengths / count)
    return torch.where(sizes.amax(1, keepdim=True) <= _LARGEST, mean.clamp(max=_LARGEST), mean.add(torch.inf))
