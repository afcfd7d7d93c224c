"""``dgc``: the largest values of an accumulated momentum (Deep Gradient Compression, Lin et al. 2018).

Momentum before the exchange, without compression: the dense form of ``dgc``.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commlib.codecs.base import Carry, Compressor, LayerSpec, Memory, Slot
from commlib.compressors.base.sparse import SparseCodec, kept
from commlib.compressors.kernels.dispatch import kernels
from commlib.compressors.none import Identity


@dataclasses.dataclass(frozen=True)
class HeavyBall(Identity):
    """Payload: u ← m·u + g (with ``nesterov``: g + m·u) in the gradient's own dtype; may be summed by an all-reduce.

    The mean over ranks of what is sent is the momentum of the mean gradient, so a layer gets the
    same momentum whether a step sends it sparse or dense. Not registered: ``dgc`` hands it out.

    Args:
        momentum: m, in [0, 1).
        nesterov: look one step ahead.
        clip: as in ``dgc``.
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip: float = 0.0

    name = "heavyball"
    unbiased = False  # of the gradient; it sends the momentum

    def slots(self, spec: LayerSpec) -> dict[str, Slot]:
        return {"momentum": Slot(spec.shape, "local")}

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        g = clipped(x, self.clip)
        u = torch.mul(memory.old["momentum"], self.momentum, out=memory.new["momentum"]).add_(g)
        sent = torch.add(g, u, alpha=self.momentum) if self.nesterov else u
        payload.view(x.dtype).copy_(sent.view(-1))

    def contraction(self, spec: LayerSpec) -> float | None:
        return None  # it sends the momentum, not the gradient


def clipped(g: Tensor, threshold: float) -> Tensor:
    """g·min(1, threshold/‖g‖) in float32, or g itself for threshold 0; non-finite values stay so."""
    if not threshold or not g.numel():
        return g
    g = g.float()
    absmax = g.abs().amax()
    unit = absmax.clamp(min=torch.finfo(torch.float32).tiny)
    norm = (g / unit).square().sum().sqrt() * unit  # squares of g itself would overflow from 2⁶⁴ on
    return g * (threshold / norm).clamp(max=1.0)


def check_momentum(name: str, momentum: float, clip: float) -> None:
    """Raises ValueError unless 0 ≤ momentum < 1 and 0 ≤ clip < ∞."""
    if not 0 <= momentum < 1:
        raise ValueError(f"{name}: momentum must be in [0, 1), got {momentum!r}")
    if not 0 <= clip < float("inf"):
        raise ValueError(f"{name}: clip must be a norm, or 0 for none, got {clip!r}")


_STAGES = 4  # of the warm-up


@dataclasses.dataclass(frozen=True)
class DGC(SparseCodec):
    """u ← m·u + g; v ← v + u; the largest values of v are sent, and u and v are zeroed there.

    It is the momentum *and* the error feedback: the optimizer must have neither. What a lossy
    ``values`` does not send stays in v. Layout: :class:`SparseCodec`.

    Args:
        ratio: share of the values that is sent, in (0, 1].
        momentum: m, in [0, 1).
        clip: scale g down to this norm first; 0 does not. It is the *local* gradient's: the paper
            takes the usual threshold times (number of ranks)^(−1/2).
        nesterov: v ← v + g + m·u.
        warmup_steps: during those, ratio^(1/5), ratio^(2/5), … a quarter of them each.
        values: codec of what is sent, as in ``topk``.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip: float = 0.0
    nesterov: bool = False
    warmup_steps: int = 0
    values: str = "fp32"

    name = "dgc"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum(self.name, self.momentum, self.clip)
        if self.warmup_steps < 0:
            raise ValueError(f"dgc: warmup_steps must not be negative, got {self.warmup_steps}")

    def slots(self, spec: LayerSpec) -> dict[str, Slot]:
        residual = {"residual": Slot(spec.shape)}
        return {"momentum": Slot(spec.shape, "local"), **residual} if self.momentum else residual

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        g = clipped(x, self.clip)
        carry = Carry(memory.old["residual"], memory.new["residual"])
        if not self.momentum:
            self._take_out(carry, *self._encode_largest(g, payload, seed, carry), payload, seed)
            return
        u = memory.new["momentum"]
        k, old = kept(self.ratio, g.numel()), memory.old["momentum"]
        places, values = kernels(g).largest_moved(g, k, self.momentum, old, u, carry, nesterov=self.nesterov)
        self._write(places, values, g.numel(), payload, seed)
        self._take_out(carry, places, values, payload, seed)
        u.view(-1).index_fill_(0, places, 0.0)

    def contraction(self, spec: LayerSpec) -> float | None:
        return None if self.clip or (self.momentum and self.nesterov) else super().contraction(spec)

    def at(self, step: int) -> Compressor:
        if step >= self.warmup_steps:
            return self
        stage = step * _STAGES // self.warmup_steps
        return dataclasses.replace(self, ratio=self.ratio ** ((stage + 1) / (_STAGES + 1)), warmup_steps=0)

    def dense_form(self) -> Compressor | None:
        return HeavyBall(self.momentum, self.nesterov, self.clip) if self.momentum else None
