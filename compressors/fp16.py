"""``fp16``: IEEE half precision."""

from __future__ import annotations

import dataclasses

import torch

from commlib.compressors.base.cast import Cast


@dataclasses.dataclass(frozen=True)
class Float16(Cast):
    """Relative error ≤ 2⁻¹¹ for 6.1e-5 ≤ |x| ≤ 65504.

    Larger values become infinite, so that a loss-scaled step is seen to have overflowed; values
    below 3e-8 vanish (error feedback keeps them), hence no contraction holds for every x.
    """

    name = "fp16"
    wire = torch.float16
