"""``ternary``: −max, 0 or max at random (TernGrad, Wen et al. 2017, without its clipping, which would bias it)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commlib.codecs.base import Carry, LayerSpec
from commlib.compressors.base.fused import Fused, rows_of_blocks
from commlib.compressors.kernels.dispatch import kernels


@dataclasses.dataclass(frozen=True)
class Ternary(Fused):
    """x decodes to sgn(x)·max with probability |x|/max, else to 0: unbiased, 1.6 bits a value.

    Payload: ⌈n/block⌉ float32 maxima of |x|, then ⌈n/5⌉ bytes of five base-3 digits (sign + 1).
    Variance: ‖x‖∞‖x‖₁ − ‖x‖² a block, ≤ ω‖x‖², ω = (√d − 1)/2, d = values in a block.

    Args:
        block: values that share a maximum; 0 is the whole tensor, as in the paper.
    """

    block: int = 0

    name = "ternary"
    unbiased = True
    random = True

    def __post_init__(self) -> None:
        if self.block < 0:
            raise ValueError(f"ternary: block must be at least 1, or 0 for the whole tensor, got {self.block}")

    def _block(self, n: int) -> int:
        return self.block or max(1, n)

    def nbytes(self, spec: LayerSpec) -> int:
        return self.scale_bytes(spec) + -(-spec.numel // 5)

    def scale_bytes(self, spec: LayerSpec) -> int:
        return 4 * -(-spec.numel // self._block(spec.numel))

    def part_rows(self, spec: LayerSpec) -> int | None:
        return rows_of_blocks(spec, self.block) if self.block else None

    def write(self, x: Tensor, payload: Tensor, carry: Carry | None, seed: int) -> None:
        kernels(x).ternary_encode(x.view(-1), payload, self._block(x.numel()), seed, carry)

    def read(self, payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
        kernels(out).ternary_decode(payloads, out.view(-1), self._block(out.numel()), add=add, scale=scale)
