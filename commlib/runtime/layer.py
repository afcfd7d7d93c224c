"""What a route is chosen for: one parameter, as every rank sees it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["linear.weight", "conv.weight", "embedding.weight", "norm", "bias", "other"]


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What a route is chosen for: one parameter, as every rank sees it.

    Args:
        name: fully qualified parameter name, without DDP's or torch.compile's prefixes.
        shape: the parameter's shape; ``()`` is a scalar.
        dtype: the gradient's dtype; must be floating point.
        device: where the gradient lives.
        kind: the role of the parameter in its module.
        rows: K, the batch rows seen per step, where the gradient factors and K is known; otherwise None.
        layer: the name of the linear layer whose rows its gradient is made of (``exchange.factors``); otherwise None.
        sparse: whether its gradient has only the rows that were looked up (an embedding with ``sparse=True``).

    Raises:
        TypeError: if ``dtype`` is not a real floating-point type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    kind: Kind = "other"
    rows: int | None = None
    layer: str | None = None
    sparse: bool = False

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise TypeError(
                f"parameter {self.name!r} is {self.dtype}: only real floating-point gradients can be "
                "compressed; freeze it (requires_grad=False) or keep it as a buffer"
            )

    @classmethod
    def of(cls, x: Tensor, name: str = "tensor") -> LayerSpec:
        """The spec of a bare tensor."""
        return _spec(name, tuple(x.shape), x.dtype, x.device)

    @property
    def numel(self) -> int:
        """Number of values."""
        return _product(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed gradient."""
        return self.numel * self.dtype.itemsize

    def layout(self) -> str:
        """Shape and dtype as text: ``300x64 float32``."""
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {str(self.dtype).removeprefix('torch.')}"

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, columns) of the gradient seen as a matrix: dimension 0 against all others."""
        if len(self.shape) < 2:
            return self.numel, 1
        return self.shape[0], _product(self.shape[1:])

    def row_slice(self, start: int, stop: int) -> LayerSpec:
        """The spec of rows ``start:stop`` along dimension 0."""
        return dataclasses.replace(self, shape=(stop - start, *self.shape[1:]))


def _product(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


@functools.lru_cache(maxsize=4096)  # a codec asks for the same again in every step
def _spec(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LayerSpec:
    return LayerSpec(name=name, shape=shape, dtype=dtype, device=device)
