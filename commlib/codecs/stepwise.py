"""Codecs that an exchange of their own drives, step by step."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory


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
