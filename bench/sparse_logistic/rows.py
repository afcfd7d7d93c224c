"""Examples whose features are mostly zero, row by row, and what a weight vector costs on them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Examples as compressed sparse rows, CPU.

    Args:
        starts: int64 (n + 1,): row i has the entries starts[i] … starts[i+1] - 1.
        keys: int64 (entries,), of features; ascending within a row, each once, in [0, features).
        values: float32 (entries,), finite.
        labels: float32 (n,), +1 or -1.
        features: how many there are; those beyond the largest key have no entry.
    """

    starts: Tensor
    keys: Tensor
    values: Tensor
    labels: Tensor
    features: int

    def __len__(self) -> int:
        return self.labels.numel()

    def of(self) -> Tensor:
        """Row of each entry, int64 (entries,)."""
        return torch.repeat_interleave(torch.arange(len(self)), self.starts.diff())

    def shard(self, index: int, count: int) -> Rows:
        """Examples index, index + count, index + 2·count …"""
        rows = torch.arange(len(self))[index::count]
        mine = self.of() % count == index
        starts = torch.zeros(rows.numel() + 1, dtype=torch.int64)
        starts[1:] = self.starts.diff()[rows].cumsum(0)
        return dataclasses.replace(
            self, starts=starts, keys=self.keys[mine], values=self.values[mine], labels=self.labels[rows]
        )

    def margins(self, weights: Tensor) -> Tensor:
        """xᵢ·w for each example, float64 (n,), of weights (features,)."""
        products = self.values.double() * weights.double()[self.keys]
        return torch.zeros(len(self), dtype=torch.float64).index_add_(0, self.of(), products)


def loss(labels: Tensor, margins: Tensor) -> float:
    """Σᵢ log(1 + exp(-yᵢ·mᵢ)), nats: the sum over examples, not their mean; labels and margins (n,)."""
    return float(nn.functional.softplus(-labels.double() * margins).sum())


def objective(rows: Rows, weights: Tensor, l1: float) -> float:
    """Loss of all examples plus l1·Σ|w|, of weights (features,): scikit-learn's with C = 1/l1, times l1."""
    return loss(rows.labels, rows.margins(weights)) + l1 * float(weights.double().abs().sum())
