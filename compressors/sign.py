"""``sign``: one bit a value and one mean (Bernstein et al. 2018; scaled, with feedback: Karimireddy et al. 2019)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commlib.codecs.base import Carry, LayerSpec
from commlib.compressors.base.fused import Fused
from commlib.compressors.kernels.dispatch import kernels


@dataclasses.dataclass(frozen=True)
class ScaledSign(Fused):
    """Each value decodes to ±mean|x|, its own sign; zero counts as positive.

    Payload: the mean as float32, then ⌈n/8⌉ bytes of bits (x ≥ 0); nothing for an empty tensor.
    δ = ‖x‖₁²/(n‖x‖²), which a single non-zero value makes 1/n.
    """

    name = "sign"

    def nbytes(self, spec: LayerSpec) -> int:
        return self.scale_bytes(spec) + -(-spec.numel // 8)

    def scale_bytes(self, spec: LayerSpec) -> int:
        return 4 if spec.numel else 0

    def write(self, x: Tensor, payload: Tensor, carry: Carry | None, seed: int) -> None:
        kernels(x).sign_encode(x.view(-1), payload, carry)

    def read(self, payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
        kernels(out).sign_decode(payloads, out.view(-1), add=add, scale=scale)

    def contraction(self, spec: LayerSpec) -> float | None:
        return 1 / max(1, spec.numel)
