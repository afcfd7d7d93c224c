"""A worker's examples by column: gradients and curvatures of the loss, block by block. Pure."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import rows
from .proximal_step import FIRST_REACH, reach_after

_QUARTER = math.log(0.25)


class ExampleShard:
    """Some examples, the weights as this worker knows them, and X·w, which follows as weights change.

    Args:
        examples: this worker's.
    """

    def __init__(self, examples: rows.Rows) -> None:
        order = examples.keys.argsort(stable=True)
        keys, counts = torch.unique_consecutive(examples.keys[order], return_counts=True)
        self.keys: Tensor = keys
        """Features that occur here, int64 (m,), ascending."""
        self._starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self._row, self._x = examples.of()[order], examples.values[order].double()
        self._y = examples.labels.double()
        self._margins = torch.zeros(len(examples), dtype=torch.float64)
        self._w = torch.zeros(self.keys.numel(), dtype=torch.float64)
        self._reach = torch.full_like(self._w, FIRST_REACH)

    def between(self, low: int, high: int) -> Tensor:
        """Features that occur here and are in [low, high), int64, ascending."""
        return self.keys[(self.keys >= low) & (self.keys < high)]

    def slopes(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and curvature bound of these examples' loss for a block's active features, each float32 (n,).

        The bound holds for all of them together: for every step d with each |d_k| within its reach r_k,
        loss(w + d) ≤ loss(w) + g·d + ½·Σ u_k·d_k². An example's margin moves by m = Σ_k |x_k|·r_k at most, so its
        curvature stays below c = min(¼, p(1 - p)·exp(m)); and (Σ x_k·d_k)² ≤ m·Σ|x_k|·d_k²/r_k (Cauchy and Schwarz),
        so u_k = Σ c·m·|x_k|/r_k over examples. The released code of Li et al. has Σ min(¼, p(1 - p)·exp(|x_k|·r_k))
        ·x_k²: that holds for one feature alone, and with few, large blocks their steps together go too far.

        Args:
            keys: int64 (n,), ascending, of features that occur here.
        """
        column, row, x = self._entries(self._places(keys))
        size, reach = x.abs(), self._reach[self._places(keys)]
        moves = torch.zeros_like(self._margins).index_add_(0, row, size * reach[column])
        p = torch.sigmoid(-self._y * self._margins)
        sure = self._margins.abs()  # p(1 - p) is exp(-that), but for the last term; it may be no float64
        curvature = (moves - sure - 2 * (-sure).exp().log1p()).clamp_(max=_QUARTER).exp()
        zeros = torch.zeros(keys.numel(), dtype=torch.float64)
        g = zeros.index_add(0, column, (-self._y * p)[row] * x)
        u = zeros.index_add(0, column, (curvature * moves)[row] * size) / reach
        return g.float(), u.float()

    def change(self, keys: Tensor, weights: Tensor) -> None:
        """Features that occur here, int64 (n,), ascending, have these weights, float32 (n,), from now on."""
        places = self._places(keys)
        old, new = self._w[places], weights.double()
        self._w[places], self._reach[places] = new, reach_after(old, new)
        moved = places[new != old]
        column, row, x = self._entries(moved)
        self._margins.index_add_(0, row, x * (new - old)[new != old][column])

    def loss(self) -> float:
        """Loss of these examples, summed, at the weights that this worker knows."""
        return rows.loss(self._y, self._margins)

    def _places(self, keys: Tensor) -> Tensor:
        return torch.searchsorted(self.keys, keys)

    def _entries(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Entries of columns, one behind the other: (which of the columns, row, value)."""
        counts = self._starts[places + 1] - self._starts[places]
        column = torch.repeat_interleave(torch.arange(places.numel()), counts)
        before = counts.cumsum(0) - counts
        entry = torch.arange(column.numel()) + (self._starts[places] - before)[column]
        return column, self._row[entry], self._x[entry]
