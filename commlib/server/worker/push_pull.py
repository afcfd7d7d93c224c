"""Shards as something like a process group, with one collective: every rank's values go there, and their sum comes.

Who waits for whom: :meth:`ServerGroup.push_pull` is called by the thread that runs the hook, and waits for nobody. Its
work waits, in a lane, until the shards have what *all* ranks push of these values in this step; each rank does so when
its hook comes to them, and what that waits for is nothing. So no rank's part waits for another's, in whatever order
buckets come, and there is no cycle. Values of different layers do not wait for each other either: each chunk has a
clock of its own, so ranks need not even agree on the order.

What comes back is the sum of exactly this step: it has all ranks' pushes of the step (bulk synchronous), and none of
the next, for this rank has not made its own of that yet. It is added up in the order of ranks, so it is the same
everywhere to the last bit, whatever came first.

Which servers sum a DDP model's gradients, as the user says it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor

from commlib.errors import CommlibError, PeerLost
from commlib.groups.process_groups import deadline
from commlib.groups.store import store_of
from commlib.groups.world import World
from commlib.runtime.exit import close_at_exit
from commlib.runtime.layers import LayerSpec
from commlib.runtime.optimizers import Recipe, Replace
from commlib.server.job.chunks import Chunk
from commlib.server.job.job import FAIL, ServerJob
from commlib.server.membership import rendezvous
from commlib.server.worker.embedded import Embedded
from commlib.server.worker.session import WorkerSession, WorkerTerms

NBYTES = 512 << 10
"""Of a chunk, at most: a sum can begin to come when a chunk is there from all (docs/adr/0020-push-pull.md)."""


@dataclasses.dataclass(frozen=True)
class Servers:
    """Shards for the route ``push_pull``: of a parameter server, but they keep no model, they sum gradients.

    Args:
        at: ``HOST:PORT`` where members meet (``commlib server meet``), or ``embedded``, which starts a shard on each
            machine (``embedded:2``: two).
        shards: how many begin at least, of those that meet elsewhere; all that are there by then are used.
        copies: shards that keep each value: with 2, one may die.
        job: its name where members meet; no two runs have the same.
        patience: seconds of silence after which a member may be given up.
        nbytes: of a chunk, at most.
        endpoint: how members are reached, an entry point of ``commlib.endpoints``.

    Raises:
        ValueError: ``at`` is no address; a number that cannot be.
    """

    at: str
    shards: int = 1
    copies: int = 1
    job: str = "default"
    patience: float = 10.0
    nbytes: int = NBYTES
    endpoint: str = "zmq"

    def __post_init__(self) -> None:
        kind, _, each = self.at.partition(":")
        if kind != "embedded":
            rendezvous.parse(self.at)
        elif self.at != kind and not (each.isdecimal() and int(each)):
            raise ValueError(f"servers are 'embedded', 'embedded:N' or 'HOST:PORT', got {self.at!r}")
        for name in ("shards", "copies"):
            if getattr(self, name) < 1:
                raise ValueError(f"servers: {name} must be 1 or more, got {getattr(self, name)}")

    @classmethod
    def of(cls, given: Servers | str | None, *, limited: bool = False) -> Servers | None:
        """Read the servers that the user means: a :class:`Servers`, where they are, or None.

        Args:
            given: by the user.
            limited: whether what ranks send keeps a limit of rate.

        Raises:
            ValueError: no address; or a limit, too.
            TypeError: something else.
        """
        if given is not None and limited:
            raise ValueError("a limit paces process groups, and pushes to servers pass none: give limit or servers")
        if given is None or isinstance(given, Servers):
            return given
        if not isinstance(given, str):
            raise TypeError(f"servers are 'HOST:PORT', 'embedded' or commlib.Servers(…), got {given!r}")
        return cls(given)

    @property
    def embedded(self) -> int:
        """How many start on each machine; 0: they are elsewhere."""
        kind, _, each = self.at.partition(":")
        return int(each or 1) if kind == "embedded" else 0

    def __str__(self) -> str:
        return self.at if self.embedded else f"{self.at}, job {self.job}"


_PARTING_S = 10.0


def job_of(specs: Sequence[LayerSpec], servers: Servers, world: int, shards: int) -> ServerJob:
    """Job that the members agree on: sums of these layers.

    Each layer has a recipe of its own, so that none shares a chunk with another: they may be in different buckets.
    """
    return ServerJob(
        {s.name: (s.shape, str(s.dtype).removeprefix("torch.")) for s in specs},
        tuple(Recipe(Replace, {}) for _ in specs),
        {s.name: i for i, s in enumerate(specs)},
        "bsp",
        world,
        shards,
        servers.copies,
        mean=False,  # ranks divide before they push, as DDP does: so a sum of what is finite is finite, too
        lost=FAIL,
        patience=servers.patience,
        nbytes=servers.nbytes,
    )


class ServerGroup:
    """This rank's way to the shards, until :meth:`close`. Collective.

    Args:
        specs: layers whose gradients may be summed there; the same on every rank.
        servers: which.
        group: the model's process group, in whose store a rank says that it cannot come.
        key: of that, one for each attachment.
        world: this rank.
        timeout: seconds that the members have to come.
        wait: seconds to wait for a sum, and so for the other ranks: the process group's.

    Raises:
        CommlibError: nobody keeps a meeting place there; the job is over, or is another; another rank cannot come.
        PeerLost: not all come in time; who.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        servers: Servers,
        group: Any,
        key: str,
        world: World,
        timeout: float,
        wait: float,
    ) -> None:
        self._world, self._closed, self._failed = world, False, False
        self._pushed: dict[str, int] = {}  # chunk → how often
        store, place, each = store_of(group), f"{key}/servers", servers.embedded
        self._embedded: Embedded | None = None
        try:
            self._embedded = Embedded(each, servers.endpoint, timeout) if each else None
            at, name = (self._embedded.address, self._embedded.name) if self._embedded else (servers.at, servers.job)
            job = job_of(specs, servers, world.size, self._embedded.shards if self._embedded else servers.shards)
            self._chunks = _by_layer(job)
            self._marks = rendezvous.visit(at, name, timeout)
            check = _Check(store, place, self._embedded)
            self._worker = WorkerSession(job, WorkerTerms(at, name, world.rank, servers.endpoint, timeout, check, wait))
            self._begin()
        except BaseException as e:
            with contextlib.suppress(RuntimeError):
                store.set(place, f"rank {world.rank} cannot come to the servers: {e}")
            if self._embedded is not None:
                self._embedded.kill()
            raise

    def size(self) -> int:
        """Number of ranks."""
        return self._world.size

    def push_pull(self, layer: str, out: Tensor, tensor: Tensor) -> Pulled:
        """``out``, (n,) ← the sum over ranks of ``tensor``, (n,), which stays as it is until then. Waits for nobody.

        Raises:
            CommlibError: what had gone wrong before.
        """
        chunks = self._chunks[layer]
        for chunk in chunks:
            self._push(chunk, tensor[chunk.pieces[0].begin : chunk.pieces[0].end].to(chunk.dtype))
        return Pulled(self, chunks, out)

    def take(self, chunk: Chunk, out: Tensor) -> None:
        """Waits for a chunk's sum, and puts it where it belongs in a layer, (n,).

        Raises:
            PeerLost: it does not come in time; a rank has left without its part; the job is over, and why.
        """
        try:
            values, included = self._worker.client.values(chunk.key)
            for rank in sorted(set(range(self._world.size)) - included.keys()):
                if self._left_at(rank).get(chunk.key, 0) < self._pushed[chunk.key]:
                    raise PeerLost(f"rank {rank} has left the servers without its part of {chunk.key}")
        except CommlibError:
            self._failed = True
            raise
        out[chunk.pieces[0].begin : chunk.pieces[0].end].copy_(values)

    def trial(self, nbytes: int) -> tuple[int, Callable[[], None]]:
        """Trial of the way to the servers: about ``nbytes`` bytes of zeros there and back. Collective.

        Only while nothing else is under way. The chunks are spread over the model, for so they are over the shards.

        Returns:
            The bytes that they really are, and a function that pushes and pulls them once.
        """
        every = [chunk for chunks in self._chunks.values() for chunk in chunks]
        total = sum(chunk.nbytes for chunk in every)
        some = every[:: max(1, -(-total // nbytes))]
        zeros = {dtype: torch.zeros(max(c.numel for c in some), dtype=dtype) for dtype in {c.dtype for c in some}}

        def through() -> None:
            for chunk in some:
                self._push(chunk, zeros[chunk.dtype][: chunk.numel])
            for chunk in some:
                self._worker.client.values(chunk.key)

        return sum(chunk.nbytes for chunk in some), through

    def close(self) -> None:
        """Leave for good; once all ranks have left, the servers end. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the meeting place may be gone
            self._marks.set(f"left/{self._world.rank}", msgpack.packb(self._pushed))
        self._worker.close(flush=False)  # whoever has got a sum has an acknowledgement of its part
        if self._embedded is None:
            return
        # others may have yet to get their last sums, from here
        if self._embedded.keeps and (self._failed or not self._worker.await_end(_PARTING_S)):
            self._embedded.kill()
        else:
            self._embedded.close()

    # -- chunks ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        """All shards have something that can be summed into; each rank has once got it, so the way is open."""
        client, every = self._worker.client, [c for chunks in self._chunks.values() for c in chunks]
        try:
            for chunk in every if self._worker.first else ():
                client.begin(chunk.key, torch.zeros(chunk.numel, dtype=chunk.dtype))
            for chunk in every:
                client.pull(chunk.key)
            for chunk in every:
                client.values(chunk.key)
        except BaseException:
            self._worker.close(flush=False)
            raise

    def _push(self, chunk: Chunk, values: Tensor) -> None:
        if self._closed:
            raise CommlibError("this rank has left the servers: attach the model anew")
        self._worker.client.push(chunk.key, values, pull=True)
        self._pushed[chunk.key] = self._pushed.get(chunk.key, 0) + 1

    def _left_at(self, rank: int) -> Mapping[str, int]:
        """Chunk → how often a rank had pushed it when it left. (It may leave while others' last sums are under way.)"""
        with contextlib.suppress(RuntimeError):
            if self._marks.check([f"left/{rank}"]):
                found: dict[str, int] = msgpack.unpackb(self._marks.get(f"left/{rank}"))
                return found
        return {}


@dataclasses.dataclass
class Pulled:
    """A layer's sum under way.

    Args:
        group: whose.
        chunks: of the layer.
        out: where it goes, (n,).
    """

    group: ServerGroup
    chunks: Sequence[Chunk]
    out: Tensor

    def wait(self) -> None:
        """Wait until the sum is there.

        Raises:
            PeerLost: as :meth:`ServerGroup.take`.
        """
        for chunk in self.chunks:
            self.group.take(chunk, self.out)


@dataclasses.dataclass
class _Check:
    """That it makes sense to wait for the members: the shards started here run, and no rank has said it cannot come."""

    store: Any
    place: str
    embedded: Embedded | None

    def __call__(self) -> None:
        if self.embedded is not None:
            self.embedded.check()
        if self.store.check([self.place]):
            raise CommlibError(self.store.get(self.place).decode())


def _by_layer(job: ServerJob) -> dict[str, list[Chunk]]:
    found: dict[str, list[Chunk]] = {name: [] for name in job.parameters}
    for chunk in job.chunks.values():
        found[chunk.pieces[0].name].append(chunk)
    return found


def join_servers(
    owner: object,
    specs: Sequence[LayerSpec],
    servers: Servers | None,
    group: Any,
    key: str,
    world: World,
    timeout: float,
) -> ServerGroup | None:
    """The way to the servers, if there are some and something goes by them; left when its owner is gone, at the latest.

    Args:
        owner: of it; but it does not keep it alive.
        specs: layers that go by them, or may come to.
        servers, group, key, world, timeout: as :class:`ServerGroup` has them.
    """
    if servers is None or not specs:
        return None
    wait = deadline(group, specs[0].device).total_seconds()
    made = ServerGroup(specs, servers, group, key, world, timeout, wait)
    close_at_exit(owner, lambda *, wait: made.close())
    return made
