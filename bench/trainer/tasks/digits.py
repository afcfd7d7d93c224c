"""Task ``digits``: 1,797 hand-written digits of 8×8 pixels, as shipped with scikit-learn, and an MLP."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from . import BadInput, Defaults, Task, needs

SPLIT_SEED = 0  # the split never changes: figures of all runs are about the same 360 test images


def load(data: Path | None, hidden: int | None) -> Task:
    """Digits: 1,437 images to train on and 360 to test with, the classes alike in both.

    Raises:
        BadInput: a data file was given; this task reads none.
        MissingDependency: scikit-learn is not installed.
    """
    if data is not None:
        raise BadInput(f"task 'digits' reads no file, got --data {data}")
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as e:
        raise needs("digits", "scikit-learn") from e
    digits = load_digits()
    x, u, y, v = train_test_split(
        digits.data, digits.target, test_size=0.2, stratify=digits.target, random_state=SPLIT_SEED
    )
    width = hidden or 512
    return Task("digits", lambda: mlp(width), _tensors(x, y), _tensors(u, v), Defaults("sgd", 0.05, 300, 32))


def mlp(width: int) -> nn.Module:
    """64 → width → width → 10 with ReLU; the middle layer has width² weights."""
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def _tensors(pixels: object, labels: object) -> tuple[Tensor, Tensor]:
    x = torch.as_tensor(pixels, dtype=torch.float32)
    return (x - 8.0) / 8.0, torch.as_tensor(labels, dtype=torch.int64)  # pixels are 0…16
