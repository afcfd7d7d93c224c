"""``sign``: one bit a value and one mean (Bernstein et al. 2018; scaled, with feedback: Karimireddy et al. 2019)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commlib.compressor import Compressor, LayerSpec, Memory, store
from commlib.compressors.kernels.bits import pack_bits, unpack_bits


@dataclasses.dataclass(frozen=True)
class ScaledSign(Compressor):
    """Each value decodes to ±mean|x|, its own sign; zero counts as positive.

    Payload: the mean as float32, then ⌈n/8⌉ bytes of bits (x ≥ 0); nothing for an empty tensor.
    δ = ‖x‖₁²/(n‖x‖²), which a single non-zero value makes 1/n.
    """

    name = "sign"

    def nbytes(self, spec: LayerSpec) -> int:
        return 4 + -(-spec.numel // 8) if spec.numel else 0

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        if x.numel():
            flat = x.view(-1)
            payload[:4].view(torch.float32).copy_(flat.abs().mean())
            payload[4:].copy_(pack_bits(flat >= 0))

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        if out.numel():
            mean = payload[:4].view(torch.float32)
            signs = unpack_bits(payload[4:], out.numel()).float().mul_(2).sub_(1)
            store(signs.mul_(mean), out, add=add, scale=scale)

    def contraction(self, spec: LayerSpec) -> float | None:
        return 1 / max(1, spec.numel)
