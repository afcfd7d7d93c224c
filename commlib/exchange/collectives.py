"""The collectives an exchange may ask for, as values.

An exchange *yields* these instead of calling ``torch.distributed``. Whoever drives it decides on which
process group, stream and thread they are issued, counts their bytes, and in tests may carry them out in
memory, all ranks in one process (``commlib.planning.simulate``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from commlib.telemetry.stats import Meter

Payers = Sequence[tuple["Meter", int]]
"""Whose bytes a collective carries: (layer's meter, its bytes in this rank's tensor)."""


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """Sum ``tensor`` over all ranks, in place; any dtype the backend can add."""

    tensor: Tensor
    payers: Payers = ()

    def issue(self, group: Any) -> Any:
        """Start it on a process group; returns the Work."""
        return group.allreduce([self.tensor])

    def wire_bytes(self, world: int) -> float:
        """Bytes this rank sends in a ring: 2(P−1)/P of the tensor."""
        return 2 * (world - 1) / world * self.tensor.nbytes


@dataclasses.dataclass(frozen=True)
class AllGather:
    """``out``, shape (P·n,), part p ← rank p's ``tensor``, shape (n,); uint8."""

    out: Tensor
    tensor: Tensor
    payers: Payers = ()

    def issue(self, group: Any) -> Any:
        """Start it on a process group; returns the Work."""
        return group._allgather_base(self.out, self.tensor)

    def wire_bytes(self, world: int) -> float:
        """Bytes this rank sends in a ring: every payload but one passes through it."""
        return (world - 1) * self.tensor.nbytes


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Rank p gets the ``splits[p]`` bytes of ``tensor`` meant for it.

    Args:
        out: (Σ out_splits,) uint8, what the others have for this rank, in rank order.
        tensor: (Σ splits,) uint8.
        own: this rank's index, whose part does not travel.
    """

    out: Tensor
    tensor: Tensor
    out_splits: list[int]
    splits: list[int]
    own: int
    payers: Payers = ()

    def issue(self, group: Any) -> Any:
        """Start it on a process group; returns the Work."""
        return group.alltoall_base(self.out, self.tensor, self.out_splits, self.splits)

    def wire_bytes(self, world: int) -> float:
        """Bytes this rank sends: all parts but its own."""
        return sum(self.splits) - self.splits[self.own]


@dataclasses.dataclass(frozen=True)
class PushPull:
    """``out``, (n,) ← the sum over all ranks of ``tensor``, (n,), by way of servers; ``tensor`` stays as it is.

    Args:
        layer: whose values they are.
    """

    layer: str
    out: Tensor
    tensor: Tensor
    payers: Payers = ()

    def issue(self, group: Any) -> Any:
        """Push and ask, by a :class:`~commlib.server.worker.push_pull.ServerGroup`; returns what can be waited for."""
        return group.push_pull(self.layer, self.out, self.tensor)

    def wire_bytes(self, world: int) -> float:
        """Bytes this rank sends: all once."""
        return self.tensor.nbytes


class Collective(Protocol):
    """Contract of a collective, for whoever drives an exchange."""

    @property
    def payers(self) -> Payers:
        """Meters that the bytes of this collective are counted in, each with its number of bytes."""

    def issue(self, group: Any) -> Any:
        """Start it on a process group; returns the Work."""

    def wire_bytes(self, world: int) -> float:
        """Bytes this rank sends; asked after :meth:`issue`."""


Scope = Literal["world", "hosts", "local", "inter", "servers"]
"""Which ranks a collective is of: all; all, in their hosts' memory; those of this rank's node; its counterparts on all
nodes; all, and servers."""


@dataclasses.dataclass(frozen=True)
class Among:
    """A collective of some of the ranks only."""

    scope: Scope
    call: Collective

    @property
    def payers(self) -> Payers:
        """Meters that the bytes of the inner collective are counted in."""
        return self.call.payers

    def issue(self, group: Any) -> Any:
        """Start it on the process group of its scope; returns the Work."""
        return self.call.issue(group)

    def wire_bytes(self, world: int) -> float:
        """Bytes this rank sends, among so many."""
        return self.call.wire_bytes(world)


def scope_of(call: Collective) -> Scope:
    """Which ranks it is of."""
    return call.scope if isinstance(call, Among) else "world"


Rounds = Generator[list[Collective], None, None]
"""An exchange under way: each ``next()`` computes up to the next round and yields its collectives."""


def lockstep(parts: Sequence[Rounds]) -> Rounds:
    """Several exchanges as one: round i of all of them is issued together, in the order given."""
    live = list(parts)
    while live:
        batch: list[Collective] = []
        going = []
        for part in live:
            try:
                batch += next(part)
                going.append(part)
            except StopIteration:
                pass
        live = going
        if batch:
            yield batch


def among(scope: Scope, rounds: Rounds) -> Rounds:
    """An exchange of some of the ranks only."""
    for batch in rounds:
        yield [Among(scope, call) for call in batch]
