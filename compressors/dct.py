"""``dct``: the largest coefficients of small blocks' cosine transforms (DeMo: Peng et al., arXiv 2411.19870)."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory, store
from commlib.compressors.kernels.dispatch import kernels
from commlib.compressors.kernels.reference.bitpack import elias_fano_nbytes
from commlib.compressors.kernels.reference.topk import largest_of_each


@dataclasses.dataclass(frozen=True)
class DCT(Compressor):
    """A matrix in blocks, each by its orthonormal two-dimensional DCT-II, of which the ``keep`` largest go.

    A block's sides are the largest divisors of the layer's that are no more than ``side``: so nothing is padded, and
    a prime side is cut in single rows. The transform keeps lengths, so what is left out is what the error is.

    Payload: coefficients (float32) in the order of their places, block by block; then the places in Elias–Fano code.

    Args:
        keep: coefficients of a block that go.
        side: of a block, at most.
    """

    keep: int = 32
    side: int = 64

    name = "dct"
    default_exchange = "gather"

    def __post_init__(self) -> None:
        for what, value in (("keep", self.keep), ("side", self.side)):
            if value < 1:
                raise ValueError(f"dct: {what} must be at least 1, got {value}")

    def nbytes(self, spec: LayerSpec) -> int:
        count = self._count(spec)
        return 4 * count + elias_fano_nbytes(spec.numel, count)

    def contraction(self, spec: LayerSpec) -> float | None:
        return self._count(spec) / spec.numel if spec.numel else 1.0

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        spec = LayerSpec.of(x)
        if not spec.numel:
            return
        sides, head = self._sides(spec), 4 * self._count(spec)
        blocks = _transform(_blocks(x.view(spec.matrix), sides), sides).flatten(1).contiguous()
        places = largest_of_each(blocks, self._kept(sides))
        payload[:head].view(torch.float32).copy_(blocks.view(-1)[places])
        kernels(x).places_encode(places, spec.numel, payload[head:])

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        spec = LayerSpec.of(out)
        if not spec.numel:
            return
        sides, count = self._sides(spec), self._count(spec)
        places = kernels(out).places_decode(payload[4 * count :], spec.numel, count)
        found = torch.zeros(spec.numel, dtype=torch.float32, device=out.device)
        found[places] = payload[: 4 * count].view(torch.float32)
        rows, columns = (n // side for n, side in zip(spec.matrix, sides, strict=True))
        values = _transform(found.view(-1, *sides), sides, back=True).view(rows, columns, *sides).transpose(1, 2)
        store(values.reshape(spec.matrix).contiguous(), out, add=add, scale=scale)

    def _sides(self, spec: LayerSpec) -> tuple[int, int]:
        n, m = spec.matrix
        return _divisor(n, self.side), _divisor(m, self.side)

    def _kept(self, sides: tuple[int, int]) -> int:
        return min(self.keep, math.prod(sides))

    def _count(self, spec: LayerSpec) -> int:
        if not spec.numel:
            return 0
        sides = self._sides(spec)
        return spec.numel // math.prod(sides) * self._kept(sides)


def _divisor(n: int, most: int) -> int:
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


def _blocks(matrix: Tensor, sides: tuple[int, int]) -> Tensor:
    """(blocks, a, b), row by row of blocks."""
    (n, m), (a, b) = matrix.shape, sides
    return matrix.view(n // a, a, m // b, b).transpose(1, 2).reshape(-1, a, b)


def _transform(blocks: Tensor, sides: tuple[int, int], *, back: bool = False) -> Tensor:
    """C_a·X·C_bᵀ, or the way back, which is by the transposed ones."""
    left, right = (_cosines(side, blocks.device) for side in sides)
    return left.T @ blocks @ right if back else left @ blocks @ right.T


def _cosines(n: int, device: torch.device) -> Tensor:
    """The orthonormal DCT-II, (n, n): row k is √(2/n)·cos(π(i + ½)k/n), the first by √½."""
    i = torch.arange(n, dtype=torch.float64, device=device)
    k = i[:, None]
    rows = torch.cos(math.pi * (i + 0.5) * k / n) * math.sqrt(2 / n)
    rows[0] *= math.sqrt(0.5)
    return rows.float()
