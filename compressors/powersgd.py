"""``powersgd``: two thin matrices (PowerSGD, Vogels et al. 2019)."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from commlib.codecs.base import LayerSpec, Memory, Slot
from commlib.codecs.cooperative import LowRank, thin_product
from commlib.compressors.kernels.dispatch import kernels
from commlib.compressors.kernels.reference.codecs import power_of_two
from commlib.compressors.kernels.reference.random import hash32


@dataclasses.dataclass(frozen=True)
class PowerSGD(LowRank):
    """M, shape (m, n), decodes to P̂Qᵀ with P̂ an orthonormal basis of M·basis and Q = MᵀP̂: one step of power iteration.

    P̂P̂ᵀM is M's projection, so its norm is at most M's, and M of rank ≤ r comes back exactly.
    The next step starts from Q, so a slowly changing M is followed ever better.

    Payload: P̂ (m, r) then Q (n, r), float32, row by row; r = min(rank, m, n).

    Args:
        rank: columns of P̂ and Q.
    """

    rank: int = 4

    name = "powersgd"
    default_exchange = "low_rank"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd: rank must be at least 1, got {self.rank}")

    def rank_of(self, spec: LayerSpec) -> int:
        return min(self.rank, *spec.matrix)

    def refuse(self, spec: LayerSpec) -> str | None:
        m, n = spec.matrix
        r = self.rank_of(spec)
        if len(spec.shape) < 2:
            return f"a tensor of shape {spec.shape} is no matrix"
        if r * (m + n) >= m * n:
            return f"rank {r} of a {m} x {n} matrix takes {r * (m + n)} values, no fewer than its {m * n}"
        return None

    def slots(self, spec: LayerSpec) -> dict[str, Slot]:
        return {"basis": Slot((spec.matrix[1], self.rank_of(spec)), "replicated", "normal")}

    def nbytes(self, spec: LayerSpec) -> int:
        return 4 * self.rank_of(spec) * sum(spec.matrix)

    def encode(self, x: Tensor, payload: Tensor, *, memory: Memory, seed: int) -> None:
        if x.numel():
            m, n = LayerSpec.of(x).matrix
            p, q = self._factors(payload, m, n)
            thin_product(x.view(m, n), memory.old["basis"], p)
            self.orthogonalise(p)
            thin_product(x.view(m, n).T, p, q)
            self.next_basis(q, memory.new["basis"])

    def decode(self, payload: Tensor, out: Tensor, *, add: bool, scale: float, seed: int) -> None:
        if out.numel():
            m, n = LayerSpec.of(out).matrix
            p, q = self._factors(payload, m, n)
            out.view(m, n).addmm_(p, q.T, beta=1.0 if add else 0.0, alpha=scale)

    def _factors(self, payload: Tensor, m: int, n: int) -> tuple[Tensor, Tensor]:
        r = min(self.rank, m, n)
        return payload[: 4 * m * r].view(torch.float32).view(m, r), payload[4 * m * r :].view(torch.float32).view(n, r)

    def orthogonalise(self, p: Tensor) -> None:
        """See :class:`LowRank`. A column of zeros is replaced by a fixed one, so the basis stays full.

        Without that a gradient once zero would leave a zero basis, from which no later one recovers. What is not finite
        counts as zero, and is still seen: Q = MᵀP̂ has its NaN.
        """
        kernels(p).orthonormal(p, _spare(tuple(p.shape), p.device))

    def next_basis(self, q: Tensor, out: Tensor) -> None:
        """See :class:`LowRank`. Q scaled to about 1, or the next M·basis would have M's unit squared.

        By a power of two, so that nothing rounds.
        """
        if q.numel():
            low, high = torch.aminmax(q)
            size = power_of_two(torch.maximum(high, -low))
            torch.div(q, torch.where(size > 0, size, 1.0), out=out)


def _spare(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Columns in place of those that are zero: fixed numbers in [−1, 1)."""
    return (_draw if is_in_torch_dispatch_mode() else _drawn)(shape, device)  # a mode's tensors may be of its own kind


def _draw(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return hash32(math.prod(shape), 0, device).to(torch.float32).view(shape) / 2**31 - 1


_drawn = functools.lru_cache(maxsize=1024)(_draw)  # a layer asks for the same in every step
