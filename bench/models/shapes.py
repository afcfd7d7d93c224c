"""Layer lists of well-known models, so that their gradients can be exchanged without the models.

Names and order are those of ``named_parameters`` in torchvision (VGG-19, ResNet-50) and Hugging Face
transformers (GPT-2 small with its head tied to the embedding, BERT-large uncased as ``BertModel``).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import nn

from commlib.errors import unknown

Layers = list[tuple[str, tuple[int, ...]]]


def layers(model: str) -> Layers:
    """(name, shape) of every trained parameter.

    Args:
        model: a name of :data:`MODELS`, or ``module:factory``: a callable without arguments, found by importing
            ``module`` (the current directory counts), that returns an ``nn.Module`` or (name, shape) pairs.

    Raises:
        ValueError: no such model, or what was found cannot be used; the message says why.
    """
    if ":" in model:
        return _from_made(model, find_factory(model)())
    if model not in MODELS:
        raise ValueError(f"{unknown('model', model, MODELS)}; your own: module:factory")
    return list(MODELS[model]())


def vgg19() -> Iterator[tuple[str, tuple[int, ...]]]:
    """VGG-19 without batch norm, 1000 classes."""
    place, channels = 0, 3
    for width, depth in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(depth):
            yield from _affine(f"features.{place}", (width, channels, 3, 3))
            place, channels = place + 2, width  # a ReLU stands between
        place += 1  # a pooling layer
    for place, shape in ((0, (4096, 512 * 7 * 7)), (3, (4096, 4096)), (6, (1000, 4096))):
        yield from _affine(f"classifier.{place}", shape)


def resnet50() -> Iterator[tuple[str, tuple[int, ...]]]:
    """ResNet-50, 1000 classes."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from _affine("bn1", (64,))
    channels = 64
    for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(depth):
            name, out = f"layer{stage}.{block}", 4 * width
            convs = ((width, channels, 1, 1), (width, width, 3, 3), (out, width, 1, 1))
            for i, shape in enumerate(convs, 1):
                yield f"{name}.conv{i}.weight", shape
                yield from _affine(f"{name}.bn{i}", shape[:1])
            if block == 0:
                yield f"{name}.downsample.0.weight", (out, channels, 1, 1)
                yield from _affine(f"{name}.downsample.1", (out,))
            channels = out
    yield from _affine("fc", (1000, channels))


def gpt2_small() -> Iterator[tuple[str, tuple[int, ...]]]:
    """GPT-2 of 12 layers, 768 wide; its linear layers are (in, out)."""
    d = 768
    yield "transformer.wte.weight", (50257, d)
    yield "transformer.wpe.weight", (1024, d)
    for i in range(12):
        block = f"transformer.h.{i}"
        yield from _affine(f"{block}.ln_1", (d,))
        yield from _affine(f"{block}.attn.c_attn", (d, 3 * d), bias=3 * d)
        yield from _affine(f"{block}.attn.c_proj", (d, d), bias=d)
        yield from _affine(f"{block}.ln_2", (d,))
        yield from _affine(f"{block}.mlp.c_fc", (d, 4 * d), bias=4 * d)
        yield from _affine(f"{block}.mlp.c_proj", (4 * d, d), bias=d)
    yield from _affine("transformer.ln_f", (d,))


def bert_large() -> Iterator[tuple[str, tuple[int, ...]]]:
    """BERT of 24 layers, 1024 wide, uncased, with its pooler."""
    d = 1024
    for table, rows in (("word", 30522), ("position", 512), ("token_type", 2)):
        yield f"embeddings.{table}_embeddings.weight", (rows, d)
    yield from _affine("embeddings.LayerNorm", (d,))
    for i in range(24):
        block = f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            yield from _affine(f"{block}.attention.self.{part}", (d, d))
        yield from _affine(f"{block}.attention.output.dense", (d, d))
        yield from _affine(f"{block}.attention.output.LayerNorm", (d,))
        yield from _affine(f"{block}.intermediate.dense", (4 * d, d))
        yield from _affine(f"{block}.output.dense", (d, 4 * d))
        yield from _affine(f"{block}.output.LayerNorm", (d,))
    yield from _affine("pooler.dense", (d, d))


def squares() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Sixteen matrices of 2048 × 2048, 256 MiB: of no model, but large enough that only bytes count."""
    for i in range(16):
        yield f"{i}.weight", (2048, 2048)


MODELS: Mapping[str, Callable[[], Iterator[tuple[str, tuple[int, ...]]]]] = {
    "vgg19": vgg19,
    "resnet50": resnet50,
    "gpt2-small": gpt2_small,
    "bert-large": bert_large,
    "squares": squares,
}


def _affine(name: str, shape: tuple[int, ...], *, bias: int | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A weight and its bias, by default one value for each row of the weight."""
    yield f"{name}.weight", shape
    yield f"{name}.bias", (shape[0] if bias is None else bias,)


def find_factory(model: str) -> Callable[[], object]:
    """Function that a user means by ``module:factory``. The current directory counts.

    Raises:
        ValueError: there is nothing of that name, or nothing that can be called.
    """
    module_name, _, attribute = model.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"a model of your own is module:factory, got {model!r}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as e:
        raise ValueError(f"model {model!r}: cannot import {module_name!r} ({e}); run it where the module is") from e
    if not hasattr(module, attribute):
        raise ValueError(f"model {model!r}: {unknown('attribute', attribute, _callables(module))}")
    factory: Callable[[], object] = getattr(module, attribute)
    if not callable(factory):
        raise ValueError(f"model {model!r}: {attribute} is no callable but of type {type(factory).__name__}")
    return factory


def _from_made(model: str, made: object) -> Layers:
    if isinstance(made, nn.Module):
        found: Layers = [(n, tuple(p.shape)) for n, p in made.named_parameters() if p.requires_grad]
    elif isinstance(made, Iterable) and not isinstance(made, str | bytes):
        found = [_pair(model, item) for item in made]
    else:
        raise ValueError(
            f"model {model!r}: returned {type(made).__name__}, and should an nn.Module or (name, shape) pairs"
        )
    if not found:
        raise ValueError(f"model {model!r}: has no parameters that are trained")
    return found


def _pair(model: str, item: object) -> tuple[str, tuple[int, ...]]:
    if isinstance(item, tuple | list) and len(item) == 2:
        name, shape = item
        whole = isinstance(shape, tuple | list) and all(isinstance(n, int) and n > 0 for n in shape)
        if isinstance(name, str) and whole:
            return name, tuple(shape)
    raise ValueError(f"model {model!r}: {item!r} is no (name, shape) pair: a text and whole sizes of at least 1")


def _callables(module: object) -> list[str]:
    return [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
