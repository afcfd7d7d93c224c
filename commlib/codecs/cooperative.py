"""Contracts of codecs that an exchange drives step by step: low-rank ones, and ones that send blocks of a layer.

A flat tensor is cut into blocks of equal length; the last one may be shorter. Nothing here waits for a device: no shape
depends on which blocks are chosen. And nothing is made that is as large as what is given: results go where they are
wanted, and what is between is :func:`scratch`.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory
from commlib.runtime.scratch import scratch


def magnitudes(flat: Tensor, block: int, out: Tensor) -> None:
    """Root mean square of every block: finite if all its values are, and only then.

    Where squares overflow (values from 1e19 on) it is the largest absolute value instead.

    Args:
        flat: (n,) float32.
        block: values in a block.
        out: (blocks,).
    """
    head, tail = _parts(flat, block)
    _root_mean_square(head, out[: len(head)])
    if tail.numel():
        _root_mean_square(tail, out[len(head) :])


def take(flat: Tensor, block: int, chosen: Tensor, out: Tensor) -> None:
    """Some blocks side by side; what the short one lacks is zeros.

    Args:
        flat: (n,).
        block: values in a block.
        chosen: which, int64, ascending.
        out: (len(chosen), block).
    """
    head, tail = _parts(flat, block)
    if not len(chosen):
        return
    if len(head):
        torch.index_select(head, 0, _whole(chosen, len(head)), out=out)
    if tail.numel():  # it is the last of them, or not among them
        short = scratch("short", (block,), flat.dtype, flat.device).zero_()
        short[: tail.shape[1]].copy_(tail[0])
        torch.where(chosen[-1] == len(head), short, out[-1], out=out[-1])


def clear(flat: Tensor, block: int, chosen: Tensor) -> None:
    """Makes these blocks zero."""
    head, tail = _parts(flat, block)
    mask = (
        scratch("mask", (-(-len(flat) // block),), torch.bool, flat.device)
        .zero_()
        .index_fill_(0, chosen, True)[:, None]
    )
    head.masked_fill_(mask[: len(head)], 0.0)
    if tail.numel():
        tail.masked_fill_(mask[len(head) :], 0.0)


def spread(values: Tensor, flat: Tensor, block: int, chosen: Tensor) -> None:
    """Overwrites ``flat``: what :func:`take` gave, in its places, and zeros elsewhere."""
    head, tail = _parts(flat, block)
    flat.zero_()
    if not len(chosen):
        return
    head.index_copy_(0, chosen[:-1], values[:-1])  # all of them are whole; the last one may be the short one
    is_short = chosen[-1] == len(head)
    if len(head):
        last = scratch("short", (1, block), flat.dtype, flat.device).copy_(values[-1:]).masked_fill_(is_short, 0.0)
        head.index_add_(0, _whole(chosen[-1:], len(head)), last)
    if tail.numel():
        tail.copy_(values[-1:, : tail.shape[1]]).masked_fill_(~is_short, 0.0)


def poison(sizes: Tensor) -> Tensor:
    """Zero, or NaN if any of the magnitudes is not finite."""
    return sizes.amax() * 0 if len(sizes) else sizes.new_zeros(())


def _parts(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The whole blocks, shape (blocks, block), and what is left, shape (1, < block)."""
    full = len(flat) // block
    return flat[: full * block].view(full, block), flat[full * block :].view(1, -1)


def _whole(chosen: Tensor, blocks: int) -> Tensor:
    """The same, with a whole block for the short one."""
    return torch.clamp(chosen, max=blocks - 1, out=scratch("whole", chosen.shape, chosen.dtype, chosen.device))


def _root_mean_square(rows: Tensor, out: Tensor) -> None:
    if not rows.numel():
        return
    torch.linalg.vector_norm(rows, dim=1, out=out)
    out /= math.sqrt(rows.shape[1])
    low, high = (scratch(what, out.shape, out.dtype, out.device) for what in ("low", "high"))
    torch.aminmax(rows, dim=1, out=(low, high))  # torch's infinity-norm takes ten times as long
    torch.maximum(high, low.neg_(), out=high)
    finite = torch.lt(out, torch.inf, out=scratch("finite", out.shape, torch.bool, out.device))
    torch.where(finite, out, high, out=out)


class LowRank(Compressor):
    """A codec whose payload is a pair of thin matrices that may be averaged in two rounds.

    ``exchange/low_rank.py`` drives it: P = M·Q, all-reduce P, orthogonalise, Q = Mᵀ·P,
    all-reduce Q, out = P·Qᵀ (PowerSGD, Vogels et al. 2019, Algorithm 1).
    It keeps a ``basis`` slot of shape (columns, rank).
    """

    @abstractmethod
    def rank_of(self, spec: LayerSpec) -> int:
        """Columns of P and Q for this layer."""

    @abstractmethod
    def orthogonalise(self, p: Tensor) -> None:
        """Replaces ``p``, shape (rows, rank), by an orthonormal basis of its columns; zero input gives a finite one."""

    @abstractmethod
    def next_basis(self, q: Tensor, out: Tensor) -> None:
        """Write to ``out`` the basis the next step starts from, given this step's Q, shape (columns, rank)."""


class Blockwise(Compressor):
    """A codec that sends some blocks of a layer, which all ranks may choose alike.

    ``exchange/blocks.py`` drives it: the sizes of what is held are summed over ranks, then the blocks chosen by them.
    It keeps a ``residual`` slot of the layer's shape, and a replicated one of what it must know of its blocks.
    """

    @abstractmethod
    def length(self, spec: LayerSpec) -> int:
        """Values in a block of this layer."""

    @abstractmethod
    def count(self, spec: LayerSpec) -> int:
        """How many blocks go in a step."""

    @abstractmethod
    def choose(self, sizes: Tensor, memory: Memory, seed: int, out: Tensor) -> None:
        """Which blocks go now, ascending, to ``out``, shape (count,) int64; notes it down in ``memory.new``.

        A pure function of sizes, shape (blocks,), the replicated slots and the seed: so all ranks choose alike.
        """

    def blocks(self, spec: LayerSpec) -> int:
        """Blocks of this layer."""
        return -(-spec.numel // self.length(spec))


def thin_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out`` = a·b for a ``b`` of few columns, as (bᵀ·aᵀ)ᵀ: from that side BLAS is two to ten times as fast.

    Args:
        a: (m, n) float32, or a transposed view of such.
        b: (n, r), r much smaller.
        out: (m, r), contiguous.
    """
    found = scratch("thin", (b.shape[1], a.shape[0]), a.dtype, a.device)
    out.copy_(torch.matmul(b.t(), a.t(), out=found).t())
