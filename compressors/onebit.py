"""``onebit``: one bit a value and two means a column (Seide et al. 2014; CNTK's ColumnQuantizer, zero threshold)."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from commlib.codecs.base import Carry, LayerSpec
from commlib.compressors.base.fused import Fused
from commlib.compressors.kernels.dispatch import kernels

_MIN_COLUMN = 256  # values: below that two float32 means cost more than a quarter of the bits


@dataclasses.dataclass(frozen=True)
class OneBit(Fused):
    """bit = (v ≥ 0); a column's negative values decode to their mean, the others to theirs.

    A *column* is the fan-in of one output neuron or channel, a row of a torch weight; rows shorter
    than 256 values are taken together until they are not. ``axis=tensor`` has one column.

    Payload: 2·columns float32 means (of v < 0, of v ≥ 0; an empty side is 0), then ⌈n/8⌉ bytes of bits.

    Args:
        axis: ``column`` or ``tensor``.
    """

    axis: str = "column"

    name = "onebit"

    def __post_init__(self) -> None:
        if self.axis not in ("column", "tensor"):
            raise ValueError(f"onebit: axis must be column or tensor, got {self.axis!r}")

    def _column(self, spec: LayerSpec) -> int:
        """Values in a column; the last one may be shorter."""
        if self.axis == "tensor":
            return max(1, spec.numel)
        return self.stripe_rows(spec) * max(1, spec.numel // max(1, _rows(spec)))

    def stripe_rows(self, spec: LayerSpec) -> int:
        if self.axis == "tensor":
            return 1
        fan_in = max(1, spec.numel // max(1, _rows(spec)))
        return -(-_MIN_COLUMN // fan_in)

    def part_rows(self, spec: LayerSpec) -> int | None:
        return None if self.axis == "tensor" else self.stripe_rows(spec)

    def nbytes(self, spec: LayerSpec) -> int:
        return self.scale_bytes(spec) + -(-spec.numel // 8)

    def scale_bytes(self, spec: LayerSpec) -> int:
        return 8 * -(-spec.numel // self._column(spec))

    def contraction(self, spec: LayerSpec) -> float | None:
        # a column v keeps ‖v‖₁²/(column·‖v‖²) of its energy at least: 1/column if only one value is not zero
        return 1 / max(1, min(self._column(spec), spec.numel))

    def write(self, x: Tensor, payload: Tensor, carry: Carry | None, seed: int) -> None:
        kernels(x).two_means_encode(x.view(-1), payload, self._column(LayerSpec.of(x)), carry)

    def read(self, payloads: Tensor, out: Tensor, *, add: bool, scale: float) -> None:
        column = self._column(LayerSpec.of(out))
        kernels(out).two_means_decode(payloads, out.view(-1), column, add=add, scale=scale)


def _rows(spec: LayerSpec) -> int:
    return spec.shape[0] if spec.shape else 1
