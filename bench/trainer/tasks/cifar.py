"""Task ``cifar``: 32×32 colour images kept as JPEG in an .npz file, and a small convolutional network."""

from __future__ import annotations

import io
import itertools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import BadInput, Defaults, Task, needs

EXPECTED = (
    "expected an .npz with, for train and test, <part>_jpeg (uint8, all files end to end), <part>_offsets "
    "(int64, n+1; image i is jpeg[offsets[i]:offsets[i+1]]) and <part>_labels (uint8, n), and classes (names)"
)
_SIDE = 32


def load(data: Path | None, hidden: int | None) -> Task:
    """Images from ``data``, normalised to about −1 … 1.

    Raises:
        BadInput: no file, or one that is not as expected (the message says what is).
        MissingDependency: Pillow is not installed.
    """
    if data is None:
        raise BadInput(f"task 'cifar' needs --data FILE: {EXPECTED}")
    try:
        with data.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            classes = len(archive["classes"])
            train, test = (_part(archive, part, classes) for part in ("train", "test"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
        raise BadInput(f"--data {data}: {e}; {EXPECTED}") from e
    width = hidden or 256
    return Task("cifar", lambda: SmallCNN(classes, width), train, test, Defaults("sgd", 0.02, 500, 32))


class SmallCNN(nn.Module):
    """Images (batch, 3, 32, 32) → logits (batch, classes); no batch norm, so ranks hold no statistics of their own."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for a, b in ((3, 32), (32, 64), (64, 128)):
            blocks += [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Linear(128 * 4 * 4, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Compute class logits."""
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits


def _part(archive: Any, part: str, classes: int) -> tuple[Tensor, Tensor]:
    jpeg, offsets, labels = (archive[f"{part}_{k}"] for k in ("jpeg", "offsets", "labels"))
    n = len(labels)
    if jpeg.dtype != np.uint8 or jpeg.ndim != 1:
        raise ValueError(f"{part}_jpeg is {jpeg.dtype} of shape {jpeg.shape}")
    if offsets.shape != (n + 1,) or offsets.dtype.kind not in "iu":
        raise ValueError(f"{part}_offsets is {offsets.dtype} of shape {offsets.shape} for {n} labels")
    if n == 0 or offsets[0] < 0 or offsets[-1] > len(jpeg) or (np.diff(offsets) <= 0).any():
        raise ValueError(f"{part}_offsets must rise within 0 … {len(jpeg)} and {part} must not be empty")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"{part}_labels reach {labels.max()} for {classes} classes")
    images = np.stack([_decode(jpeg[a:b].tobytes(), part, i) for i, (a, b) in enumerate(itertools.pairwise(offsets))])
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float().sub_(127.5).div_(64.0)
    return x.contiguous(), torch.from_numpy(labels.astype(np.int64))


def _decode(data: bytes, part: str, index: int) -> Any:
    try:
        from PIL import Image
    except ImportError as e:
        raise needs("cifar", "Pillow") from e
    try:
        image = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    except OSError as e:  # Pillow's UnidentifiedImageError is one
        raise ValueError(f"{part} image {index} cannot be decoded ({e})") from e
    if image.shape != (_SIDE, _SIDE, 3):
        raise ValueError(f"{part} image {index} is {image.shape[1]}×{image.shape[0]}, not {_SIDE}×{_SIDE}")
    return image
