"""``topk``: the largest values (Aji and Heafield 2017; with feedback: Stich et al. 2018)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commlib.compressor import Carry, Memory
from commlib.compressors.sparse import Sparse


@dataclasses.dataclass(frozen=True)
class TopK(Sparse):
    """The ⌈ratio·n⌉ values of largest magnitude; ties are resolved alike for equal input. Layout: :class:`Sparse`.

    Args:
        ratio: share of the values that is sent, in (0, 1].
        values: codec for them: ``fp32``, or any registered one without memory (``fp16``, ``int8``, ``int4``, …).
    """

    ratio: float = 0.01
    values: str = "fp32"

    name = "topk"

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        self._encode_largest(x, payload, seed)

    def encode_feedback(self, x: Tensor, carry: Carry, payload: Tensor, *, memory: Memory, seed: int) -> None:
        places = self._encode_largest(x, payload, seed, carry)
        self._take_out(carry.new.view(-1), places, payload, seed)
