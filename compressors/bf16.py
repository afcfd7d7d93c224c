"""``bf16``: the upper half of float32."""

from __future__ import annotations

import dataclasses

import torch

from commlib.codecs.base import LayerSpec
from commlib.compressors.base.cast import Cast


@dataclasses.dataclass(frozen=True)
class BFloat16(Cast):
    """Relative error ≤ 2⁻⁸ with float32's range: what fp16 loses to overflow, this keeps."""

    name = "bf16"
    wire = torch.bfloat16

    def contraction(self, spec: LayerSpec) -> float | None:
        return 1 - 2.0**-16  # of normal numbers, |x| ≥ 1.2e-38
