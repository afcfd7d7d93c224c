"""The shared base of the codecs whose loops are kernels."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory
from commlib.codecs.slots import Carry
from commlib.compressors.kernels import dispatch


def rows_of_blocks(spec: LayerSpec, block: int) -> int:
    """Rows of a layer that are a whole number of blocks: the fewest."""
    values = max(1, spec.matrix[1])
    return block // math.gcd(block, values)


class Fused(Compressor):
    """Codec that adds the residual, gathers statistics and packs in one go, and decodes all ranks' payloads in one."""

    def carries(self, held: Tensor) -> bool:
        return held.dtype != torch.int8 or dispatch.kernels(held).name == "numba"

    @abstractmethod
    def write(self, x: Tensor, payload: Tensor, carry: Carry | None, seed: int) -> None:
        """Encode ``x``, or x + carry.old, leaving in carry.new what is not sent of it."""

    @abstractmethod
    def read(self, payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
        """Write or add scale times the sum of what payloads, shape (P, bytes), decode to."""

    def kernels(self, like: Tensor) -> str:
        return dispatch.kernels(like).name

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        self.write(x, payload, None, seed)

    def encode_feedback(self, x: Tensor, carry: Carry, payload: Tensor, *, memory: Memory, seed: int) -> None:
        self.write(x, payload, carry, seed)

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        self.read(payload[None], out, add=add, scale=scale)

    def decode_sum(self, payloads: Tensor, out: Tensor, *, scale: float, seeds: Sequence[int]) -> None:
        self.read(payloads, out, add=False, scale=scale)
