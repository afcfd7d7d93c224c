"""A run with all its ranks, and what it came to."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from .byte_counters import Counted, InThreads, connect
from .partition import SparsePartition
from .rows import Rows
from .server import Pass, Served, Server
from .worker import Worked, Worker


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What a run came to.

    Args:
        weights: float32 (features,), of the servers.
        passes: over all blocks, one after another.
        worker_bytes, server_bytes: sent by all of them, after each pass.
        converged: whether it ended because the objective changed too little.
        asked: how many times keys had to be asked for.
    """

    weights: Tensor
    passes: list[Pass]
    worker_bytes: list[int]
    server_bytes: list[int]
    converged: bool
    asked: int

    def reached(self, objective: float) -> int | None:
        """Bytes that all had sent after the first pass with an objective of at most that; None if there is none."""
        there = (i for i, each in enumerate(self.passes) if each.objective <= objective)
        first = next(there, None)
        return None if first is None else self.worker_bytes[first] + self.server_bytes[first]


def play(endpoint: Counted, plan: SparsePartition, addresses: Sequence[str], examples: Rows | None) -> Served | Worked:
    """Part of one rank, a server or a worker with its examples; the endpoint is closed afterwards.

    Args:
        addresses: of all ranks.

    Raises:
        PeerLost, ProtocolError: as :meth:`Server.run`; the other ranks are told why.
    """
    with endpoint:
        connect(endpoint, addresses, plan.peers(endpoint.rank))
        if endpoint.rank < plan.servers:
            return Server(endpoint, plan).run()
        if examples is None:
            raise ValueError(f"rank {endpoint.rank} is a worker, and has no examples")
        return Worker(endpoint, plan, examples).run()


def gathered(parts: Sequence[Served | Worked]) -> Outcome:
    """All ranks' parts, by rank, in one."""
    servers = [p for p in parts if isinstance(p, Served)]
    workers = [p for p in parts if isinstance(p, Worked)]
    return Outcome(
        torch.cat([s.weights for s in servers]),
        servers[0].passes,
        [sum(each) for each in zip(*(w.sent for w in workers), strict=True)],
        [sum(each) for each in zip(*(s.sent for s in servers), strict=True)],
        servers[0].converged,
        sum(p.asked for p in parts),
    )


def in_threads(plan: SparsePartition, examples: Rows) -> Outcome:
    """A run within this process, a thread for each rank; worker i has the i-th of every ``plan.workers`` examples.

    Raises:
        PeerLost, ProtocolError, CommlibError: that of the rank that failed first.
    """
    endpoints = [InThreads(rank, timeout=plan.timeout) for rank in range(plan.ranks)]
    addresses = [endpoint.address for endpoint in endpoints]
    parts: dict[int, Served | Worked] = {}
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        mine = None if rank < plan.servers else examples.shard(rank - plan.servers, plan.workers)
        try:
            parts[rank] = play(endpoints[rank], plan, addresses, mine)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=one, args=(rank,), name=f"sparse-{rank}") for rank in range(plan.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return gathered([parts[rank] for rank in range(plan.ranks)])
