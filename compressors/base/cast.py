"""The shared base of the codecs that only shorten the floating-point format."""

from __future__ import annotations

import torch
from torch import Tensor

from commlib.codecs.base import Carry, LayerSpec
from commlib.compressors.base.fused import Fused
from commlib.compressors.kernels.dispatch import kernels


class Cast(Fused):
    """Payload: the values rounded to the nearest in ``wire``, 2 bytes each; may be summed by an all-reduce."""

    elementwise = True
    min_size = 0  # all layers of a bucket go as one, in one collective
    default_exchange = "dense"
    wire: torch.dtype

    def nbytes(self, spec: LayerSpec) -> int:
        return spec.numel * self.wire.itemsize

    def part_rows(self, spec: LayerSpec) -> int | None:
        return 1

    def write(self, x: Tensor, payload: Tensor, carry: Carry | None, seed: int) -> None:
        if carry is None:  # torch's own loop does it at the speed of memory, and loads nothing
            payload.view(self.wire).copy_(x.view(-1))
        else:
            kernels(x).cast_encode(x.view(-1), payload, self.wire, carry)

    def read(self, payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
        if len(payloads) == 1 and not add and scale == 1.0:
            out.view(-1).copy_(payloads[0].view(self.wire))
        else:
            kernels(out).cast_decode(payloads, out.view(-1), self.wire, add=add, scale=scale)

    def reduce_dtype(self, spec: LayerSpec) -> torch.dtype | None:
        return self.wire
