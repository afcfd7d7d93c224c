"""The models a plan knows by name: the parameters of :mod:`commlib.bench.models.shapes`, and the FLOPs that go with
them.

Inception-v3 (Szegedy et al., CVPR 2016) as torchvision builds it, images of 299 × 299.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from commlib.bench.models.shapes import layers as parameters
from commlib.errors import unknown

from .model import LayeredModel, ModelLayer, conv, grouped, linear, plain

_Conv = tuple[str, int, int, int, int, int]
"""Name, inputs, outputs, height and width of the kernel, side of what comes out."""


def inception_v3(auxiliary: bool = True) -> Iterator[ModelLayer]:
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


def _normed(prefix: str, convs: tuple[_Conv, ...]) -> Iterator[ModelLayer]:
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


_IMAGENET_22K = 21841  # classes


def vgg19(classes: int = 1000) -> Iterator[ModelLayer]:
    """VGG-19 without batch norm, images of 224 × 224; 21841 classes make Poseidon's VGG19-22K."""
    pools = (4, 9, 18, 27)  # places in ``features``; what comes later sees half the side
    for name, shapes in grouped(parameters("vgg19")):
        place = int(name.rpartition(".")[2])
        if name.startswith("features"):
            yield conv(name, shapes, (224 >> sum(p < place for p in pools)) ** 2)
        elif name == "classifier.6":
            yield linear(name, [(classes, shapes[0][1]), (classes,)], 1)
        else:
            yield linear(name, shapes, 1)


def resnet50() -> Iterator[ModelLayer]:
    """ResNet-50, images of 224 × 224, the stride in the 3 × 3 convolutions."""
    for name, shapes in grouped(parameters("resnet50")):
        if name == "fc":
            yield linear(name, shapes, 1)
        elif len(shapes[0]) == 1:
            yield plain(name, "norm", shapes)
        elif name == "conv1":
            yield conv(name, shapes, 112**2)
        else:
            stage = int(name[len("layer")])
            before_stride = stage > 1 and name.endswith(".0.conv1")
            yield conv(name, shapes, (56 >> (stage - 1) << before_stride) ** 2)


def gpt2(positions: int) -> Iterator[ModelLayer]:
    """GPT-2 small. The head shares the embedding's weight: it computes, and has no parameters of its own."""
    width, vocabulary = 768, 50257
    for name, shapes in grouped(parameters("gpt2-small")):
        if len(shapes[0]) == 1:
            yield plain(name, "norm", shapes)
        elif name.endswith((".wte", ".wpe")):
            yield plain(name, "embedding", shapes)
        else:
            yield linear(name, shapes, positions, inputs_first=True)
        if name.endswith(".c_attn"):
            yield _attention(name.rpartition(".")[0], width, positions)
    yield ModelLayer("lm_head", "other", 0, 2 * width * vocabulary * positions)


def bert_large(positions: int) -> Iterator[ModelLayer]:
    """BERT-large as ``BertModel``: no head, and a pooler that sees the first position."""
    for name, shapes in grouped(parameters("bert-large")):
        if len(shapes[0]) == 1:
            yield plain(name, "norm", shapes)
        elif name.endswith("_embeddings"):
            yield plain(name, "embedding", shapes)
        else:
            yield linear(name, shapes, 1 if name == "pooler.dense" else positions)
        if name.endswith(".value"):
            yield _attention(name.rpartition(".")[0], 1024, positions)


def _attention(name: str, width: int, positions: int) -> ModelLayer:
    """Scores of every position with every other, and the means they weight; no mask saves anything."""
    return ModelLayer(name, "attention", 0, 4 * width * positions**2)


@dataclasses.dataclass(frozen=True)
class _Images:
    layers: Callable[[], Iterator[ModelLayer]]
    side: int


@dataclasses.dataclass(frozen=True)
class _Text:
    layers: Callable[[int], Iterator[ModelLayer]]
    most: int  # positions


_KNOWN: Mapping[str, _Images | _Text] = {
    "vgg19": _Images(vgg19, 224),
    "vgg19-22k": _Images(lambda: vgg19(_IMAGENET_22K), 224),
    "resnet50": _Images(resnet50, 224),
    "inception-v3": _Images(inception_v3, 299),
    "gpt2": _Text(gpt2, 1024),
    "bert-large": _Text(bert_large, 512),
}
MODELS = tuple(_KNOWN)
"""Names that :func:`known` takes."""


def known(name: str, positions: int | None = None) -> LayeredModel:
    """A model by name.

    Args:
        name: one of :data:`MODELS`.
        positions: of an example, for gpt2 (up to 1024) and bert-large (up to 512); by default the most it has.

    Raises:
        ValueError: no such model, or positions it does not have.
    """
    if name not in _KNOWN:
        raise ValueError(f"{unknown('model', name, MODELS)}; your own: module:factory with --input")
    found = _KNOWN[name]
    if isinstance(found, _Text):
        count = found.most if positions is None else positions
        if not 1 <= count <= found.most:
            raise ValueError(f"--positions of {name} must be from 1 to {found.most}, got {count}")
        return LayeredModel(name, tuple(found.layers(count)), f"{count} positions", 8)
    if positions is not None:
        raise ValueError(f"--positions is for gpt2 and bert-large: {name} sees images")
    return LayeredModel(name, tuple(found.layers()), f"3 × {found.side} × {found.side}", 32)
