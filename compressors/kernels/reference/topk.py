"""Which values are sent, as compositions of torch operators: a part of ``reference``."""

from __future__ import annotations

import torch
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.slots import Carry
from commlib.compressors.kernels.reference.bitpack import elias_fano_decode, elias_fano_encode
from commlib.compressors.kernels.reference.random import hash32

places_encode, places_decode = elias_fano_encode, elias_fano_decode

_MAGNITUDE = 0x7FFFFFFF
_AT_ONCE = 1 << 20  # values whose keys, twice as long, are held at once


def places_add(payload: Tensor, values: Tensor, scale: float, out: Tensor) -> None:
    """Add values times ``scale``, float32, shape (k,), to those of ``out``, shape (n,), whose places were encoded."""
    places = places_decode(payload, out.numel(), values.numel())
    out.index_add_(0, places, values if scale == 1 else values * scale)


def largest(x: Tensor, k: int, carry: Carry | None = None) -> tuple[Tensor, Tensor]:
    """The k values of largest magnitude, and where they are; of equal ones the first. NaN is above infinity.

    Args:
        x: float32, shape (n,), n ≥ k ≥ 0.
        k: how many.
        carry: look at x + carry.old instead, which is left in carry.new. (Values are those before it is shortened.)

    Returns:
        (places, values): int64, ascending, and float32, shape (k,) each.
    """
    v = joined(x, carry)
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


def joined(x: Tensor, carry: Carry | None) -> Tensor:
    """x, or x + carry.old, float32, which is left in carry.new."""
    if carry is None:
        return x
    v = torch.add(x, carry.old.view(-1), out=None if carry.short else carry.new.view(-1))
    if carry.short:
        residuals.shorten(v.clone(), carry.new, carry.up)  # it is needed as it is
    return v


def largest_of_each(v: Tensor, k: int) -> Tensor:
    """Where the k values of largest magnitude of each row are; of equal ones the first. NaN is above infinity.

    Args:
        v: float32, (rows, n), contiguous, n ≥ k.
        k: how many of each row.

    Returns:
        int64, (rows·k,), ascending: indices into all values.
    """
    rows, n = v.shape
    at_once = max(1, _AT_ONCE // max(1, n))
    places = torch.empty(rows, k, dtype=torch.int64, device=v.device)
    backwards = torch.arange(n, 0, -1, device=v.device)
    for first in range(0, rows, at_once):
        some = v[first : first + at_once]
        # no two keys are equal, so which are the largest does not depend on how they are found
        keys = (some.view(torch.int32) & _MAGNITUDE).to(torch.int64).bitwise_left_shift_(32).bitwise_or_(backwards)
        places[first : first + len(some)] = keys.topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    return places.add_(torch.arange(rows, device=v.device)[:, None], alpha=n).view(-1)


def largest_moved(
    g: Tensor, k: int, m: float, old: Tensor, u: Tensor, carry: Carry, *, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """u = m·old + g; carry.new = carry.old + u, or (``nesterov``) carry.old + (m·u + g); the k largest of that.

    Args:
        g, old, u: of one shape; ``u`` is written, and may be ``old``.
        k, carry: as in :func:`largest`, whose result it is.
        m: the momentum.
    """
    return largest(moved(g, m, old, u, carry, nesterov=nesterov), k)


def moved(g: Tensor, m: float, old: Tensor, u: Tensor, carry: Carry, *, nesterov: bool) -> Tensor:
    """Vector, shape (n,), of which :func:`largest_moved`, whose arguments these are, takes the largest values."""
    torch.mul(old, m, out=u).add_(g)
    return torch.add(carry.old, torch.mul(u, m).add_(g) if nesterov else u, out=carry.new).view(-1)


def strata(n: int, k: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uniformly random index of each of k consecutive strata that differ by at most one in size.

    Returns:
        (indices, sizes of their strata), int64, shape (k,) each; the same on every device.
    """
    edges = torch.arange(k + 1, device=device) * n // k
    sizes = edges[1:] - edges[:-1]
    return edges[:-1] + (hash32(k, seed, device) * sizes >> 32), sizes
