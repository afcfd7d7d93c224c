"""Whether values are finite."""

from __future__ import annotations

import torch
from torch import Tensor


def finite(values: Tensor) -> bool:
    """Whether all are. One pass where the sum says so; a sum that overflows does not."""
    return not values.is_floating_point() or bool(torch.isfinite(values.sum()) or values.isfinite().all())
