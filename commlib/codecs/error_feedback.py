"""Error feedback: what was not sent this step is sent later, for any codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.base import Carry, Compressor, LayerSpec, Memory, Slot
from commlib.runtime.scratch import scratch


@dataclasses.dataclass(frozen=True)
class ErrorFeedback(Compressor):
    """Wraps a codec: v = x + r is sent, and r ← v − decoded(v) is kept (Seide et al. 2014, Karimireddy et al. 2019).

    Summed over time nothing is lost: Σ sent + r = Σ x. A biased codec converges only with it.

    Args:
        inner: the codec.
        decay: β: v = x + βr, so what is held back long fades away, as in SparseLoCo (arXiv 2508.15706); 1: it stays.
        residual: format of r: ``float32``, ``bfloat16`` in half the memory, or ``int8`` in a quarter
            (:mod:`commlib.codecs.residuals`).

    Raises:
        ValueError: if the codec is lossless or keeps a residual of its own; β is not in (0, 1]; no such format.
    """

    inner: Compressor
    decay: float = 1.0
    residual: str = "float32"

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"error feedback decays by a factor in (0, 1], got ef={self.decay}")
        if self.residual not in residuals.DTYPES:
            *several, last = residuals.DTYPES
            known = f"{', '.join(several)} or {last}"
            raise ValueError(f"error feedback keeps its residual as {known}, got residual={self.residual}")
        if not self.inner.takes_feedback:
            raise ValueError(f"error feedback around '{self.inner}': it is lossless or keeps a residual of its own")
        for attr in ("name", "random", "shared_seed", "elementwise", "min_size", "default_exchange"):
            object.__setattr__(self, attr, getattr(self.inner, attr))
        if self.residual == "int8":  # values share a scale
            object.__setattr__(self, "elementwise", False)

    def nbytes(self, spec: LayerSpec) -> int:
        return self.inner.nbytes(spec)

    def slots(self, spec: LayerSpec) -> dict[str, Slot]:
        dtype = residuals.dtype_of(self.residual, spec.shape)
        return {"residual": Slot(spec.shape, dtype=dtype), **self.inner.slots(spec)}

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        old, new = memory.old["residual"], memory.new["residual"]
        if self._in_one_pass(new):
            carry = Carry(old if self.decay == 1 else torch.mul(old, self.decay, out=new), new, memory.up)
            self.inner.encode_feedback(x, carry, payload, memory=memory, seed=seed)
        else:
            v = scratch("feedback", x.shape, torch.float32, x.device).copy_(x)
            self.encode_over(v, payload, memory=memory, seed=seed)

    def encode_over(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        if self._in_one_pass(memory.new["residual"]):
            self.encode(x, payload, memory=memory, seed=seed)
            return
        residuals.add(memory.old["residual"], x, self.decay)
        self.inner.encode(x, payload, memory=memory, seed=seed)
        self.inner.decode(payload, x, add=True, scale=-1.0, seed=seed)
        residuals.shorten(x, memory.new["residual"], memory.up)

    def _in_one_pass(self, new: Tensor) -> bool:
        return new.dtype == torch.float32 or (self.decay == 1 and self.inner.carries(new))

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        self.inner.decode(payload, out, add=add, scale=scale, seed=seed)

    def decode_sum(self, payloads: Tensor, out: Tensor, *, scale: float, seeds: Sequence[int]) -> None:
        self.inner.decode_sum(payloads, out, scale=scale, seeds=seeds)

    def contraction(self, spec: LayerSpec) -> float | None:
        return self.inner.contraction(spec)

    def reduce_dtype(self, spec: LayerSpec) -> torch.dtype | None:
        return self.inner.reduce_dtype(spec)

    def stripe_rows(self, spec: LayerSpec) -> int:
        return self.inner.stripe_rows(spec)

    def part_rows(self, spec: LayerSpec) -> int | None:
        return self.inner.part_rows(spec)

    def scale_bytes(self, spec: LayerSpec) -> int:
        return self.inner.scale_bytes(spec)

    def refuse(self, spec: LayerSpec) -> str | None:
        return self.inner.refuse(spec)

    def at(self, step: int) -> Compressor:
        inner = self.inner.at(step)
        return self if inner is self.inner else dataclasses.replace(self, inner=inner)

    def kernels(self, like: Tensor) -> str:
        return self.inner.kernels(like)

    def dense_form(self) -> Compressor | None:
        return self.inner.dense_form()

    @property
    def is_feedback(self) -> bool:
        return True

    @property
    def takes_feedback(self) -> bool:
        return False

    def options(self) -> dict[str, object]:
        inner = {k: v for k, v in self.inner.options().items() if k != "ef"}
        if self.decay != 1 or self.inner.unbiased:
            inner["ef"] = True if self.decay == 1 else self.decay
        return inner if self.residual == ErrorFeedback.residual else {**inner, "residual": self.residual}


def with_default_feedback(codec: Compressor) -> Compressor:
    """The codec as a plain spec string means it: biased ones get error feedback, unbiased ones do not."""
    return ErrorFeedback(codec) if codec.takes_feedback and not codec.unbiased else codec
