"""The models that race, each with data made up on the spot from which it learns within a few steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""Inputs and classes, both on the CPU."""

_VOCABULARY, _CONTEXT = 256, 32
_CLASSES = 10
_PIXELS = 32
_FEATURES = 9216  # 256 channels of 6 × 6, as AlexNet's convolutions leave them


@dataclasses.dataclass(frozen=True)
class BenchmarkModel:
    """A model and its task.

    Args:
        about: in a few words, for the help.
        module: makes it, with weights from torch's global generator.
        data: (examples, generator) → a batch; its task is always the same, its examples are the generator's.
        batch: examples for each rank and step, unless one says otherwise.
        lr: learning rate of plain SGD: a wrong mean of the gradients shows in the loss, as under Adam it would not.
    """

    about: str
    module: Callable[[], nn.Module]
    data: Callable[[int, torch.Generator], Batch]
    batch: int
    lr: float


class Gpt(nn.Module):
    """A decoder-only transformer, pre-norm, with learned positions. Tokens (batch, time) → logits (…, vocabulary)."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Embedding(_CONTEXT, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class GptBlock(nn.Module):
    """Causal attention, then an MLP of four times the width; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = self.qkv(self.before(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        result: Tensor = x + self.mlp(self.between(x))
        return result


def fc() -> nn.Module:
    """The fully connected part of AlexNet, 58.6 M parameters: much gradient for little arithmetic."""
    sizes = [_FEATURES, 4096, 4096]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layer = nn.Linear(before, after)
        nn.init.kaiming_normal_(layer.weight)  # torch's own choice lets the signal fade from layer to layer
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, _head(sizes[-1], 1000))


def conv() -> nn.Module:
    """A VGG of 1.6 M parameters: little gradient for much arithmetic. GroupNorm, for batch norm is each rank's own."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 256), (256, 256), (256, 256)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.GroupNorm(8, after), nn.ReLU()]
        if after > before:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), _head(256 * (_PIXELS // 16) ** 2))


def vectors(examples: int, generator: torch.Generator) -> Batch:
    """Vectors (examples, 9216) around the centre of their class, the first ten of a thousand."""
    classes = _labels(examples, generator)
    noise = torch.randn(examples, _FEATURES, generator=generator)
    return _fixed(_CLASSES, _FEATURES)[classes] + noise, classes


def images(examples: int, generator: torch.Generator) -> Batch:
    """Images (examples, 3, 32, 32): their class's picture under noise."""
    classes = _labels(examples, generator)
    noise = torch.randn(examples, 3, _PIXELS, _PIXELS, generator=generator)
    pictures = nn.functional.interpolate(_fixed(_CLASSES, 3, 4, 4), size=_PIXELS)
    return pictures[classes] + 0.5 * noise, classes


def text(examples: int, generator: torch.Generator) -> Batch:
    """Tokens (examples, 32) and what follows each: one in ten is random, the others follow from the one before.

    Half of the vocabulary is never used, so that there is something to learn in the first steps.
    """
    used = _VOCABULARY // 2
    follows = torch.randperm(used, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(used, (examples, _CONTEXT + 1), generator=generator)
    surprise = torch.rand(examples, _CONTEXT + 1, generator=generator) < 0.1
    for t in range(1, _CONTEXT + 1):
        tokens[:, t] = torch.where(surprise[:, t], tokens[:, t], follows[tokens[:, t - 1]])
    return tokens[:, :-1], tokens[:, 1:]


def _labels(examples: int, generator: torch.Generator) -> Tensor:
    """Every class as often as any other: else the first steps only learn which came up more often."""
    return torch.randperm(examples, generator=generator) % _CLASSES


def _head(width: int, classes: int = _CLASSES) -> nn.Linear:
    """Weights so small that no class is preferred: the loss falls from the first step on."""
    head = nn.Linear(width, classes)
    nn.init.normal_(head.weight, std=0.1 / width**0.5)
    return head


def _fixed(*shape: int) -> Tensor:
    """The same normal numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


MODELS: Mapping[str, BenchmarkModel] = {
    "fc": BenchmarkModel("58.6 M", fc, vectors, 32, 0.003),
    "conv": BenchmarkModel("1.6 M", conv, images, 10, 0.01),
    "gpt": BenchmarkModel("3.3 M", lambda: Gpt(256, 4, 4), text, 4, 0.3),
    "gpt-small": BenchmarkModel("0.7 M", lambda: Gpt(128, 3, 4), text, 4, 0.5),
}
