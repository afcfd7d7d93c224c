"""The models a plan knows by name: the parameters of :mod:`commlib.bench.models.shapes`, and the FLOPs that go with
them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

from commlib.bench.models.shapes import layers as parameters
from commlib.errors import unknown

from .inception import inception_v3
from .model import Layer, Model, conv, grouped, linear, plain

_IMAGENET_22K = 21841  # classes


def vgg19(classes: int = 1000) -> Iterator[Layer]:
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


def resnet50() -> Iterator[Layer]:
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


def gpt2(positions: int) -> Iterator[Layer]:
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
    yield Layer("lm_head", "other", 0, 2 * width * vocabulary * positions)


def bert_large(positions: int) -> Iterator[Layer]:
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


def _attention(name: str, width: int, positions: int) -> Layer:
    """Scores of every position with every other, and the means they weight; no mask saves anything."""
    return Layer(name, "attention", 0, 4 * width * positions**2)


@dataclasses.dataclass(frozen=True)
class _Images:
    layers: Callable[[], Iterator[Layer]]
    side: int


@dataclasses.dataclass(frozen=True)
class _Text:
    layers: Callable[[int], Iterator[Layer]]
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


def known(name: str, positions: int | None = None) -> Model:
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
        return Model(name, tuple(found.layers(count)), f"{count} positions", 8)
    if positions is not None:
        raise ValueError(f"--positions is for gpt2 and bert-large: {name} sees images")
    return Model(name, tuple(found.layers()), f"3 × {found.side} × {found.side}", 32)
