"""``natural``: powers of two, rounded at random (Horváth et al. 2019)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commlib.codecs.base import Carry, LayerSpec
from commlib.compressors.base.fused import Fused
from commlib.compressors.kernels.dispatch import kernels


@dataclasses.dataclass(frozen=True)
class Natural(Fused):
    """x decodes to one of the two powers of two around it, at random so that the mean is x: one byte a value.

    Payload: the largest power of two 2^E ≤ max|x| as float32, then bytes sign·128 + c: zero for
    c = 0, else ±2^(E + c − 126), c = 1 … 127. Values below the smallest code, 125 octaves under
    2^E, become it or zero at random. Nothing for an empty tensor.

    Variance ≤ ω‖x‖² with ω = 1/8 (worst at 4/3·2^e), the values below the smallest code excepted.
    A value above 2^127 that is rounded up is infinite.
    """

    name = "natural"
    unbiased = True
    random = True

    def nbytes(self, spec: LayerSpec) -> int:
        return self.scale_bytes(spec) + spec.numel

    def scale_bytes(self, spec: LayerSpec) -> int:
        return 4 if spec.numel else 0

    def write(self, x: Tensor, payload: Tensor, carry: Carry | None, seed: int) -> None:
        kernels(x).natural_encode(x.view(-1), payload, seed, carry)

    def read(self, payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
        kernels(out).natural_decode(payloads, out.view(-1), add=add, scale=scale)
