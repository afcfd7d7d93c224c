"""Which values are sent, as compositions of torch operators: a part of ``reference``."""

from __future__ import annotations

import torch
from torch import Tensor

from commlib.compressors.kernels.bits import elias_fano_decode, elias_fano_encode
from commlib.compressors.kernels.random import hash32
from commlib.slots import Carry

places_encode, places_decode = elias_fano_encode, elias_fano_decode

_MAGNITUDE = 0x7FFFFFFF


def largest(x: Tensor, k: int, carry: Carry | None = None) -> tuple[Tensor, Tensor]:
    """The k values of largest magnitude, and where they are; of equal ones the first. NaN is above infinity.

    Args:
        x: float32, shape (n,), n ≥ k ≥ 0.
        k: how many.
        carry: look at x + carry.old instead, which is left in carry.new.

    Returns:
        (places, values): int64, ascending, and float32, shape (k,) each.
    """
    v = x if carry is None else torch.add(x, carry.old.view(-1), out=carry.new.view(-1))
    if not k:
        return torch.empty(0, dtype=torch.int64, device=v.device), v[:0]
    sizes = v.view(torch.int32) & _MAGNITUDE
    least = sizes.topk(k, sorted=False).values.amin()
    above, equal = sizes > least, sizes == least
    chosen = above | (equal & (equal.cumsum(0) <= k - above.sum()))
    # the i-th that is chosen writes its place into cell i; all others write into a spare cell
    cell = torch.where(chosen, chosen.cumsum(0) - 1, k)
    places = torch.empty(k + 1, dtype=torch.int64, device=v.device)
    places = places.scatter_(0, cell, torch.arange(v.numel(), device=v.device))[:k]
    return places, v[places]


def largest_moved(
    g: Tensor, k: int, m: float, old: Tensor, u: Tensor, carry: Carry, *, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """u = m·old + g; carry.new = carry.old + u, or (``nesterov``) carry.old + (m·u + g); the k largest of that.

    Args:
        g, old, u: of one shape; ``u`` is written, and may be ``old``.
        k, carry: as in :func:`largest`, whose result it is.
        m: the momentum.
    """
    torch.mul(old, m, out=u).add_(g)
    v = torch.add(carry.old, torch.mul(u, m).add_(g) if nesterov else u, out=carry.new)
    return largest(v.view(-1), k)


def strata(n: int, k: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One uniformly random index of each of k consecutive strata that differ by at most one in size.

    Returns:
        (indices, sizes of their strata), int64, shape (k,) each; the same on every device.
    """
    edges = torch.arange(k + 1, device=device) * n // k
    sizes = edges[1:] - edges[:-1]
    return edges[:-1] + (hash32(k, seed, device) * sizes >> 32), sizes
