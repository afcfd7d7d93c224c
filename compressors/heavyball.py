"""Momentum before the exchange, without compression: the dense form of ``dgc``."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from commlib.codecs.base import LayerSpec, Memory, Slot
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
