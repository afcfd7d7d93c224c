"""``qsgd``: levels of the norm, rounded at random (Alistarh et al. 2017)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commlib.codecs.base import Carry, LayerSpec
from commlib.compressors.base.blockwise import BlockQuantized
from commlib.compressors.kernels.dispatch import kernels

_MOST_LEVELS = 32767  # 16 bits a value


@dataclasses.dataclass(frozen=True)
class QSGD(BlockQuantized):
    """x decodes to ‖x‖/s·sgn(x)·ξ, where ξ is s|x|/‖x‖ rounded up or down at random: unbiased.

    Layout: :class:`BlockQuantized` with scale = the block's Euclidean norm and ⌈log₂(2s + 1)⌉ bits a value.
    Variance: ‖x‖²/s²·Σ f(1 − f) with f the fractional parts, ≤ ω‖x‖², ω = min(d/s², √d/s), d = block.

    Args:
        levels: s; 7 makes 4 bits, 127 makes 8.
        block: d, values that share a norm: fewer cost more bytes and err less.
    """

    levels: int = 7
    block: int = 512

    name = "qsgd"
    unbiased = True
    random = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.levels <= _MOST_LEVELS:
            raise ValueError(f"qsgd: levels must be in [1, {_MOST_LEVELS}], got {self.levels}")

    def write(self, x: Tensor, payload: Tensor, carry: Carry | None, seed: int) -> None:
        kernels(x).norm_encode(x.view(-1), payload, self.block, self.levels, seed, carry)

    def contraction(self, spec: LayerSpec) -> float | None:
        return None
