"""A run with a process for each rank, which talk over ZeroMQ on this machine's loopback."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from commlib.bench.launch.child import tell
from commlib.bench.launch.processes import run_ranks

from . import dataset
from .byte_counters import OverTcp
from .generate import Generated
from .partition import SparsePartition
from .rows import Rows
from .server import Served
from .solve import Outcome, gathered, play
from .worker import Worked

_MEET_S = 600.0  # for all to come: workers read a file that may be large before


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank is told.

    Args:
        source: of the examples: a LIBSVM file that every worker can read, or what to generate.
        plans: runs, one after another, in the same processes; as many servers and workers in each.
    """

    source: Path | Generated
    plans: tuple[SparsePartition, ...]


@dataclasses.dataclass(frozen=True)
class Progress:
    """Said by rank 0 when a run begins."""

    run: int


def examples(source: Path | Generated, features: int | None = None, shard: tuple[int, int] = (0, 1)) -> Rows:
    """All examples, or every shard[1]-th from the shard[0]-th on.

    Raises:
        BadFile: a line of the file is no example.
        OSError: it cannot be read.
    """
    if isinstance(source, Path):
        return dataset.read(source, features=features, shard=shard)
    return source.rows().shard(*shard)


def main(job: Job) -> list[tuple[Served | Worked, int, float]]:
    """Body of one rank: for each run its part, the bytes it sent in all, to its goodbye, and the seconds it took."""
    torch.set_num_threads(1)
    rank, first = int(os.environ["RANK"]), job.plans[0]
    mine = None
    if rank >= first.servers:
        mine = examples(job.source, first.features, (rank - first.servers, first.workers))
    patience = datetime.timedelta(seconds=_MEET_S)
    store = c10d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=patience)
    results = []
    for number, plan in enumerate(job.plans):
        endpoint = OverTcp(rank, job=f"sparse {number}", timeout=plan.timeout, ranks=plan.ranks)
        store.set(f"sparse/{number}/{rank}", endpoint.address)
        addresses = [_address(store, number, peer) for peer in range(plan.ranks)]
        if rank == 0:
            tell(Progress(number))
        began = time.monotonic()
        part = play(endpoint, plan, addresses, mine)
        results.append((part, endpoint.sent, time.monotonic() - began))
    return results


def _address(store: Any, number: int, peer: int) -> str:
    key = f"sparse/{number}/{peer}"
    try:
        return str(store.get(key).decode())
    except RuntimeError as e:  # DistStoreError from a TCPStore
        raise TimeoutError(f"rank {peer} has not come within {_MEET_S:g} s: {e}") from e


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """A run with real processes.

    Args:
        outcome: what it came to.
        worker_bytes, server_bytes: sent by all of them, from the first greeting to the last goodbye.
        seconds: of the slowest rank, without starting its process and reading its examples.
    """

    outcome: Outcome
    worker_bytes: int
    server_bytes: int
    seconds: float

    @property
    def bytes(self) -> int:
        return self.worker_bytes + self.server_bytes


def in_processes(job: Job, on_run: Callable[[int], None] | None = None) -> list[Measured]:
    """All runs of a job.

    Args:
        on_run: told the number of each run as it begins.

    Raises:
        RankFailed, TimeoutError, KeyboardInterrupt: as :func:`commlib.bench.launch.processes.run_ranks`.
    """

    def said(_: int, message: object) -> None:
        if on_run is not None and isinstance(message, Progress):
            on_run(message.run)

    ranks = run_ranks(main, job.plans[0].ranks, (job,), on_message=said)
    return [_measured(plan, [rank[i] for rank in ranks]) for i, plan in enumerate(job.plans)]


def _measured(plan: SparsePartition, parts: Sequence[tuple[Served | Worked, int, float]]) -> Measured:
    sent = [part[1] for part in parts]
    return Measured(
        gathered([part[0] for part in parts]),
        worker_bytes=sum(sent[plan.servers :]),
        server_bytes=sum(sent[: plan.servers]),
        seconds=max(part[2] for part in parts),
    )
