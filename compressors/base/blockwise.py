"""The shared base of the codecs with one scale and whole levels −L … L a block."""

from __future__ import annotations

from torch import Tensor

from commlib.codecs.base import Carry, LayerSpec
from commlib.compressors.base.fused import Fused, rows_of_blocks
from commlib.compressors.kernels.dispatch import kernels
from commlib.compressors.kernels.reference.bitpack import fields_nbytes


class BlockQuantized(Fused):
    """value ≈ level/L · scale of its block; here scale = absmax and the level is the nearest (half to even).

    Payload: ⌈n/block⌉ float32 scales, then level + L in the fewest bits that hold 2L + 1 codes,
    packed without gaps. |error| ≤ absmax/(2L), and the absmax itself is exact.

    δ = 4L²/(4L² + block − 1): beside an exact absmax, each of the block − 1 others can at worst be
    half a level, absmax/(2L), and be rounded to zero.
    """

    block: int
    levels: int

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"{self.name}: block must be at least 1, got {self.block}")

    def nbytes(self, spec: LayerSpec) -> int:
        return self.scale_bytes(spec) + fields_nbytes(spec.numel, (2 * self.levels).bit_length())

    def scale_bytes(self, spec: LayerSpec) -> int:
        return 4 * -(-spec.numel // self.block)

    def part_rows(self, spec: LayerSpec) -> int | None:
        return rows_of_blocks(spec, self.block)

    def write(self, x: Tensor, payload: Tensor, carry: Carry | None, seed: int) -> None:
        kernels(x).linear_encode(x.view(-1), payload, self.block, self.levels, carry)

    def read(self, payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
        kernels(out).levels_decode(payloads, out.view(-1), self.block, self.levels, add=add, scale=scale)

    def contraction(self, spec: LayerSpec) -> float | None:
        others = min(self.block, max(1, spec.numel)) - 1
        return 4 * self.levels**2 / (4 * self.levels**2 + others)
