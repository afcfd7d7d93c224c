"""The shared base of the codecs that only shorten the floating-point format."""

from __future__ import annotations

import torch
from torch import Tensor

from commlib.compressor import Compressor, LayerSpec, Memory, store


class Cast(Compressor):
    """Payload: the values rounded to the nearest in ``wire``, 2 bytes each; may be summed by an all-reduce."""

    default_exchange = "dense"
    wire: torch.dtype

    def nbytes(self, spec: LayerSpec) -> int:
        return spec.numel * self.wire.itemsize

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        payload.view(self.wire).copy_(x.view(-1))

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        # widened first: scaling in the short format would round a second time
        store(payload.view(self.wire).to(out.dtype), out, add=add, scale=scale)

    def reduce_dtype(self, spec: LayerSpec) -> torch.dtype | None:
        return self.wire
