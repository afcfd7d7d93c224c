"""``topk``: the largest values (Aji and Heafield 2017; with feedback: Stich et al. 2018)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commlib.codecs.base import Carry, Memory
from commlib.compressors.base.sparse import SparseCodec, kept
from commlib.compressors.kernels.reference.topk import joined, largest_of_each


@dataclasses.dataclass(frozen=True)
class TopK(SparseCodec):
    """The ⌈ratio·n⌉ values of largest magnitude; ties are resolved alike for equal input. Layout: :class:`SparseCodec`.

    Args:
        ratio: share of the values that is sent, in (0, 1].
        values: codec for them: ``fp32``, or any registered one without memory (``fp16``, ``int8``, ``int4``, …).
        chunk: the ⌈ratio·chunk⌉ largest of every so many values, as SparseLoCo and DeMo have it; 0: of all.
    """

    ratio: float = 0.01
    values: str = "fp32"
    chunk: int = 0

    name = "topk"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 0:
            raise ValueError(f"topk: chunk must be 1 or more, or 0 for all values, got {self.chunk}")

    def carries(self, held: Tensor) -> bool:
        return held.dtype != torch.int8

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        self._encode_largest(x, payload, seed)

    def encode_feedback(self, x: Tensor, carry: Carry, payload: Tensor, *, memory: Memory, seed: int) -> None:
        places, values = self._encode_largest(x, payload, seed, carry)
        self._take_out(carry, places, values, payload, seed)

    def _count(self, n: int) -> int:
        if not self.chunk:
            return super()._count(n)
        chunks, rest = divmod(n, self.chunk)
        return chunks * kept(self.ratio, self.chunk) + kept(self.ratio, rest)

    def _largest(self, x: Tensor, carry: Carry | None) -> tuple[Tensor, Tensor]:
        if not self.chunk or x.numel() <= self.chunk:
            return super()._largest(x, carry)
        v = joined(x.view(-1), carry)
        whole = v.numel() // self.chunk * self.chunk
        first = largest_of_each(v[:whole].view(-1, self.chunk), kept(self.ratio, self.chunk))
        last = largest_of_each(v[None, whole:], kept(self.ratio, v.numel() - whole))
        places = torch.cat([first, last + whole])
        return places, v[places]
