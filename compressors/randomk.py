"""``randomk``: a random part of the values, the same on all ranks (Stich et al. 2018; Wangni et al. 2018)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory
from commlib.compressors.base.sparse import check_ratio, kept
from commlib.compressors.kernels import dispatch
from commlib.compressors.kernels.dispatch import kernels
from commlib.runtime.scratch import scratch

_FORMATS = {"fp32": torch.float32, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class RandomK(Compressor):
    """Uniformly random value of each of k = ⌈ratio·n⌉ equal strata, the rest is zero.

    The places follow from the seed that all ranks share, so none are sent, and payloads may be
    summed by an all-reduce. Drawing costs O(k); equal strata err no more than k places drawn freely.

    Payload: k values, float32 or float16.

    Args:
        ratio: share of the values that is sent, in (0, 1].
        values: ``fp32`` or ``fp16``.
        scaled: multiply what is decoded by the size of its stratum, ≈ n/k: unbiased (up to fp16's
            rounding), with ω = ⌈n/k⌉ − 1. Else biased with δ = 1/⌈n/k⌉, for error feedback.
    """

    ratio: float = 0.01
    values: str = "fp32"
    scaled: bool = False

    name = "randomk"
    random = True
    shared_seed = True
    default_exchange = "dense"

    def __post_init__(self) -> None:
        check_ratio(self.name, self.ratio)
        if self.values not in _FORMATS:
            raise ValueError(f"randomk: values must be fp32 or fp16, got {self.values!r}")
        object.__setattr__(self, "unbiased", self.scaled)

    def nbytes(self, spec: LayerSpec) -> int:
        return kept(self.ratio, spec.numel) * _FORMATS[self.values].itemsize

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        n = x.numel()
        if n:
            flat = x.view(-1)
            places, _ = kernels(x).strata(n, kept(self.ratio, n), seed, x.device)
            low, high = torch.aminmax(flat)
            poison = low * 0 + high * 0  # NaN if any value, sent or not, is not finite
            values = scratch("randomk", places.shape, x.dtype, x.device)
            torch.index_select(flat, 0, places, out=values)
            payload.view(_FORMATS[self.values]).copy_(values.add_(poison))

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        flat = out.view(-1)
        n = flat.numel()
        if not add:
            flat.zero_()
        if n:
            places, sizes = kernels(out).strata(n, kept(self.ratio, n), seed, out.device)
            values = scratch("randomk", places.shape, out.dtype, out.device)
            values.copy_(payload.view(_FORMATS[self.values]))
            flat.index_add_(0, places, values.mul_(sizes) if self.scaled else values, alpha=scale)

    def kernels(self, like: Tensor) -> str:
        return dispatch.kernels(like).name

    def contraction(self, spec: LayerSpec) -> float | None:
        if self.scaled or self.values != "fp32":
            return None
        return 1 / -(-spec.numel // kept(self.ratio, spec.numel)) if spec.numel else 1.0

    def reduce_dtype(self, spec: LayerSpec) -> torch.dtype | None:
        return _FORMATS[self.values]
