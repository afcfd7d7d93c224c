"""Inception-v3 (Szegedy et al., CVPR 2016) as torchvision builds it, images of 299 × 299."""

from __future__ import annotations

from collections.abc import Iterator

from .model import Layer, conv, linear, plain

_Conv = tuple[str, int, int, int, int, int]
"""Name, inputs, outputs, height and width of the kernel, side of what comes out."""


def inception_v3(auxiliary: bool = True) -> Iterator[Layer]:
    """All layers, 1000 classes.

    Args:
        auxiliary: with the second classifier, which takes part in training only.
    """
    yield from _normed("", _STEM)
    for name, inputs, pooled in (("5b", 192, 32), ("5c", 256, 64), ("5d", 288, 64)):
        yield from _normed(f"Mixed_{name}.", _block_a(inputs, pooled))
    yield from _normed("Mixed_6a.", _BLOCK_B)
    for name, narrow in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        yield from _normed(f"Mixed_{name}.", _block_c(narrow))
    if auxiliary:  # its backward pass comes after that of what follows here
        yield from _normed("AuxLogits.", (("conv0", 768, 128, 1, 1, 5), ("conv1", 128, 768, 5, 5, 1)))
        yield linear("AuxLogits.fc", [(1000, 768), (1000,)], 1)
    yield from _normed("Mixed_7a.", _BLOCK_D)
    for name, inputs in (("7b", 1280), ("7c", 2048)):
        yield from _normed(f"Mixed_{name}.", _block_e(inputs))
    yield linear("fc", [(1000, 2048), (1000,)], 1)


def _normed(prefix: str, convs: tuple[_Conv, ...]) -> Iterator[Layer]:
    """Convolutions without a bias, each with its batch norm."""
    for name, inputs, outputs, height, width, side in convs:
        yield conv(f"{prefix}{name}.conv", [(outputs, inputs, height, width)], side**2)
        yield plain(f"{prefix}{name}.bn", "norm", [(outputs,), (outputs,)])


_STEM: tuple[_Conv, ...] = (
    ("Conv2d_1a_3x3", 3, 32, 3, 3, 149),
    ("Conv2d_2a_3x3", 32, 32, 3, 3, 147),
    ("Conv2d_2b_3x3", 32, 64, 3, 3, 147),
    ("Conv2d_3b_1x1", 64, 80, 1, 1, 73),
    ("Conv2d_4a_3x3", 80, 192, 3, 3, 71),
)


def _block_a(inputs: int, pooled: int) -> tuple[_Conv, ...]:
    return (
        ("branch1x1", inputs, 64, 1, 1, 35),
        ("branch5x5_1", inputs, 48, 1, 1, 35),
        ("branch5x5_2", 48, 64, 5, 5, 35),
        ("branch3x3dbl_1", inputs, 64, 1, 1, 35),
        ("branch3x3dbl_2", 64, 96, 3, 3, 35),
        ("branch3x3dbl_3", 96, 96, 3, 3, 35),
        ("branch_pool", inputs, pooled, 1, 1, 35),
    )


_BLOCK_B: tuple[_Conv, ...] = (
    ("branch3x3", 288, 384, 3, 3, 17),
    ("branch3x3dbl_1", 288, 64, 1, 1, 35),
    ("branch3x3dbl_2", 64, 96, 3, 3, 35),
    ("branch3x3dbl_3", 96, 96, 3, 3, 17),
)


def _block_c(narrow: int) -> tuple[_Conv, ...]:
    return (
        ("branch1x1", 768, 192, 1, 1, 17),
        ("branch7x7_1", 768, narrow, 1, 1, 17),
        ("branch7x7_2", narrow, narrow, 1, 7, 17),
        ("branch7x7_3", narrow, 192, 7, 1, 17),
        ("branch7x7dbl_1", 768, narrow, 1, 1, 17),
        ("branch7x7dbl_2", narrow, narrow, 7, 1, 17),
        ("branch7x7dbl_3", narrow, narrow, 1, 7, 17),
        ("branch7x7dbl_4", narrow, narrow, 7, 1, 17),
        ("branch7x7dbl_5", narrow, 192, 1, 7, 17),
        ("branch_pool", 768, 192, 1, 1, 17),
    )


_BLOCK_D: tuple[_Conv, ...] = (
    ("branch3x3_1", 768, 192, 1, 1, 17),
    ("branch3x3_2", 192, 320, 3, 3, 8),
    ("branch7x7x3_1", 768, 192, 1, 1, 17),
    ("branch7x7x3_2", 192, 192, 1, 7, 17),
    ("branch7x7x3_3", 192, 192, 7, 1, 17),
    ("branch7x7x3_4", 192, 192, 3, 3, 8),
)


def _block_e(inputs: int) -> tuple[_Conv, ...]:
    return (
        ("branch1x1", inputs, 320, 1, 1, 8),
        ("branch3x3_1", inputs, 384, 1, 1, 8),
        ("branch3x3_2a", 384, 384, 1, 3, 8),
        ("branch3x3_2b", 384, 384, 3, 1, 8),
        ("branch3x3dbl_1", inputs, 448, 1, 1, 8),
        ("branch3x3dbl_2", 448, 384, 3, 3, 8),
        ("branch3x3dbl_3a", 384, 384, 1, 3, 8),
        ("branch3x3dbl_3b", 384, 384, 3, 1, 8),
        ("branch_pool", inputs, 192, 1, 1, 8),
    )
