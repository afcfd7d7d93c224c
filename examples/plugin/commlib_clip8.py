"""``clip8``: float8 values of a tensor scaled to its largest. All that a codec of one's own takes."""

import dataclasses

import torch

from commlib.codecs.base import Compressor, LayerSpec, Memory, store


@dataclasses.dataclass(frozen=True)
class Clip8(Compressor):
    """Payload: max|x| as float32, then x/max|x| as float8 (e4m3), one byte each."""

    name = "clip8"

    def nbytes(self, spec: LayerSpec) -> int:
        return 4 + spec.numel

    def encode(self, x: torch.Tensor, payload: torch.Tensor, *, memory: Memory, seed: int) -> None:
        top = torch.cat([x.view(-1).abs(), x.new_zeros(1)]).amax()
        share = torch.nan_to_num(x.view(-1) / torch.where(top > 0, top, 1.0))
        payload[:4].view(torch.float32).copy_(top)
        payload[4:].view(torch.float8_e4m3fn).copy_(share)

    def decode(self, payload: torch.Tensor, out: torch.Tensor, *, add: bool, scale: float, seed: int) -> None:
        values = payload[4:].view(torch.float8_e4m3fn).float() * payload[:4].view(torch.float32)
        store(values, out, add=add, scale=scale)
