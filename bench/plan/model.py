"""A model as a plan sees it: layers in the order of the forward pass, with parameters, FLOPs and rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from commlib.bench.models.shapes import Layers

Kind = Literal["attention", "conv", "embedding", "linear", "norm", "other"]


@dataclasses.dataclass(frozen=True)
class ModelLayer:
    """Layer of a model. A FLOP is an addition or a multiplication, so a multiply-add counts two.

    Args:
        name: of the module.
        kind: what it computes.
        parameters: trained values, the bias among them; 0 for what has none, or shares another layer's.
        flops: of the forward pass of one example; products of matrices and convolutions only.
        inputs: M of a linear layer with a weight of its own; 0 for any other layer.
        outputs: N of it; 0 for any other layer.
        rows: rows that one example sends through a linear layer; 0 for any other layer.
    """

    name: str
    kind: Kind
    parameters: int
    flops: int
    inputs: int = 0
    outputs: int = 0
    rows: int = 0

    @property
    def linear(self) -> bool:
        """Whether its weight gradient is made of rows that could travel in its place."""
        return self.inputs > 0


@dataclasses.dataclass(frozen=True)
class LayeredModel:
    """Layers, and what one example is.

    Args:
        name: as it was asked for.
        layers: in the order of the forward pass.
        example: shape of an example, for people.
        batch: examples a rank, unless one says otherwise.
    """

    name: str
    layers: tuple[ModelLayer, ...]
    example: str
    batch: int

    @property
    def parameters(self) -> int:
        """Number of trained values."""
        return sum(x.parameters for x in self.layers)

    @property
    def flops(self) -> int:
        """FLOPs of the forward pass of one example."""
        return sum(x.flops for x in self.layers)

    @property
    def linear(self) -> tuple[ModelLayer, ...]:
        """The layers whose gradient may travel as factors."""
        return tuple(x for x in self.layers if x.linear)


def grouped(parameters: Layers) -> list[tuple[str, list[tuple[int, ...]]]]:
    """Layer → shapes of its parameters, the weight first; from (``layer.weight``, shape) pairs in their order."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in parameters:
        found.setdefault(name.rpartition(".")[0], []).append(shape)
    return list(found.items())


def plain(name: str, kind: Kind, shapes: Sequence[tuple[int, ...]]) -> ModelLayer:
    """A layer without arithmetic that counts."""
    return ModelLayer(name, kind, sum(map(math.prod, shapes)), 0)


def conv(name: str, shapes: Sequence[tuple[int, ...]], pixels: int) -> ModelLayer:
    """Make a convolution layer.

    Args:
        name: of the layer.
        shapes: of its parameters; the weight is first, (outputs, inputs, height, width).
        pixels: height times width of what comes out.
    """
    return ModelLayer(name, "conv", sum(map(math.prod, shapes)), 2 * math.prod(shapes[0]) * pixels)


def linear(name: str, shapes: Sequence[tuple[int, ...]], rows: int, *, inputs_first: bool = False) -> ModelLayer:
    """A linear layer with a weight of its own.

    Args:
        name: of the layer.
        shapes: of its parameters; the weight is first, (outputs, inputs).
        rows: of one example.
        inputs_first: the weight is (inputs, outputs).
    """
    m, n = shapes[0] if inputs_first else shapes[0][::-1]
    return ModelLayer(name, "linear", sum(map(math.prod, shapes)), 2 * m * n * rows, inputs=m, outputs=n, rows=rows)
