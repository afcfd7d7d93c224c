"""Delivery of a rank's rows: to which ranks they go, and in which bytes: one round of one layer.

Either way each rank gets from each rank one *letter*: room for so many rows of what it will multiply.

Which part of a linear layer's gradient each rank makes, where the work is shared out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from commlib.exchange.factors.payload import RowCapacity, RowPayload
from commlib.exchange.factors.tap import Rows
from commlib.groups.world import World


@dataclasses.dataclass(frozen=True)
class BlockShares:
    """Blocks of a layer with weight (N, M): the larger dimension in P parts, as equal as can be, the low ranks' being
    larger.

    That is the dimension to cut: a rank's rows go to each owner as K·(the other + block) values. A rank's block may be
    empty, of a dimension smaller than P; its share of the bias is then empty too.

    Args:
        n: outputs, N.
        m: inputs, M.
        size: ranks, P.
    """

    n: int
    m: int
    size: int

    @property
    def by_outputs(self) -> bool:
        """Whether blocks are of outputs (rows of the weight), and not of inputs."""
        return self.n >= self.m

    def outputs(self, rank: int) -> slice:
        """Rows of the weight, and columns of V that its block is made of."""
        return block(self.n, self.size, rank) if self.by_outputs else slice(0, self.n)

    def inputs(self, rank: int) -> slice:
        """Columns of the weight, and of U."""
        return slice(0, self.m) if self.by_outputs else block(self.m, self.size, rank)

    def bias(self, rank: int) -> slice:
        """Block of the bias, whichever dimension of the weight is cut."""
        return block(self.n, self.size, rank)

    @property
    def longest(self) -> int:
        """Length of the longest block."""
        return -(-max(self.n, self.m) // self.size)

    @property
    def largest(self) -> int:
        """Values of the largest block."""
        return self.longest * min(self.n, self.m)


def block(length: int, size: int, rank: int) -> slice:
    """Slice of one rank's block of a dimension cut into ``size`` blocks, as equal as can be, the low ranks' being
    larger."""
    part, more = divmod(length, size)
    start = rank * part + min(rank, more)
    return slice(start, start + part + (rank < more))


class RowDelivery(Protocol):
    """The contract: pure but for :meth:`start`; all ranks' are alike."""

    world: World
    shape: tuple[int, int]
    """(N, M) of the weight."""
    payload: RowPayload
    """Of the rows that come here from each rank."""

    def sent(self, room: RowCapacity) -> int:
        """Bytes this rank sends in one round."""

    def busiest(self, room: RowCapacity, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that the busiest rank sends until all have the gradient; alike on all ranks.

        Args:
            room: of the rows.
            dtype: of the gradient.
        """

    def start(
        self, group: Any, device: torch.device, room: RowCapacity, rows: Sequence[Rows] | None, seeds: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Any]:
        """Issue a round.

        Args:
            group: process group.
            device: of the gradients.
            room: the same on all ranks.
            rows: of all calls; None sends zeros.
            seeds: of a random codec, for inputs and output gradients.

        Returns:
            Where the letters of all ranks will be, in rank order, (P·n,) uint8, n a multiple of 8; what this rank
            sends; and the work.
        """


class BroadcastDelivery:
    """Everything to every rank, by an all-gather (sufficient-factor broadcasting: Xie et al., UAI 2016).

    Args:
        payload: of a rank's rows.
        world: this rank.
    """

    def __init__(self, payload: RowPayload, world: World) -> None:
        self.payload, self.world, self.shape = payload, world, (payload.n, payload.m)

    def sent(self, room: RowCapacity) -> int:
        """As :meth:`RowDelivery.sent`: in a ring."""
        return (self.world.size - 1) * self.payload.nbytes(room)

    def busiest(self, room: RowCapacity, dtype: torch.dtype = torch.float32) -> int:
        """As :meth:`RowDelivery.busiest`: everybody multiplies for itself, so rows are all."""
        return (self.world.size - 1) * self.payload.nbytes(room)

    def start(
        self, group: Any, device: torch.device, room: RowCapacity, rows: Sequence[Rows] | None, seeds: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Any]:
        """Same contract as :meth:`RowDelivery.start`."""
        letter = torch.zeros(self.payload.nbytes(room), dtype=torch.uint8, device=device)
        if rows is not None:
            self.payload.write(letter, room, rows, seeds)
        out = torch.empty(self.world.size * len(letter), dtype=torch.uint8, device=device)
        return out, letter, group._allgather_base(out, letter)


class OwnerDelivery:
    """Delivery to each rank of what its block is made of, by an all-to-all (Project Adam, OSDI 2014; in blocks: SACP,
    2015).

    Args:
        n: outputs of the layer.
        m: inputs.
        world: this rank.
    """

    def __init__(self, n: int, m: int, world: World) -> None:
        self.world, self.shape, self.shares = world, (n, m), BlockShares(n, m, world.size)
        self._columns = [(self.shares.inputs(r), self.shares.outputs(r)) for r in range(world.size)]
        self._payloads = [RowPayload(v.stop - v.start, u.stop - u.start) for u, v in self._columns]
        self.payload = self._payloads[world.rank]

    def sent(self, room: RowCapacity) -> int:
        """As :meth:`RowDelivery.sent`: each letter directly, but its own stays here."""
        return sum(p.nbytes(room) for r, p in enumerate(self._payloads) if r != self.world.rank)

    def busiest(self, room: RowCapacity, dtype: torch.dtype = torch.float32) -> int:
        """As :meth:`RowDelivery.busiest`: the last rank's letter to itself is shortest; blocks are padded to the
        first."""
        blocks = (self.world.size - 1) * self.shares.largest * dtype.itemsize
        return sum(p.nbytes(room) for p in self._payloads[:-1]) + blocks

    def start(
        self, group: Any, device: torch.device, room: RowCapacity, rows: Sequence[Rows] | None, seeds: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Any]:
        """Same contract as :meth:`RowDelivery.start`."""
        lengths = [p.nbytes(room) for p in self._payloads]
        send = torch.zeros(sum(lengths), dtype=torch.uint8, device=device)
        if rows is not None:
            letters = torch.split(send, lengths)
            for letter, p, (inputs, outputs) in zip(letters, self._payloads, self._columns, strict=True):
                p.write(letter, room, [(u[:, inputs], v[:, outputs]) for u, v in rows], seeds)
        mine = lengths[self.world.rank]
        out = torch.empty(self.world.size * mine, dtype=torch.uint8, device=device)
        return out, send, group.alltoall_base(out, send, [mine] * self.world.size, lengths)
