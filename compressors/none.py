"""``none``: the gradient itself."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory, store


@dataclasses.dataclass(frozen=True)
class Identity(Compressor):
    """Payload: the gradient's own bytes. Lossless, and may be summed by an all-reduce."""

    name = "none"
    unbiased = True
    lossless = True
    default_exchange = "dense"

    def nbytes(self, spec: LayerSpec) -> int:
        return spec.nbytes

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        payload.view(x.dtype).copy_(x.view(-1))

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        store(payload.view(out.dtype), out, add=add, scale=scale)

    def contraction(self, spec: LayerSpec) -> float | None:
        return 1.0

    def reduce_dtype(self, spec: LayerSpec) -> torch.dtype | None:
        return spec.dtype
