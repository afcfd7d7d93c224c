"""Runs with a process for each shard and each worker, which talk over ZeroMQ on this machine's loopback."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from commlib.bench.launch.child import tell
from commlib.bench.launch.processes import run_ranks
from commlib.server.membership import rendezvous
from commlib.server.shard.serve import serve
from commlib.server.worker.session import WorkerTerms

from . import dataset
from .generate import Generated
from .rows import Rows
from .settings import SparseSettings
from .solve import Solved, solve

_MEET_S = 600.0  # for all to come: workers read a file that may be large before


@dataclasses.dataclass(frozen=True)
class Progress:
    """Number of the run that begins, as the first worker tells it."""

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


def main(source: Path | Generated, at: str, runs: Sequence[SparseSettings]) -> list[Solved]:
    """Body of one rank: the first are shards, the others workers. What a worker came to in each run, or nothing.

    Args:
        source: of the examples: a LIBSVM file that every worker can read, or what to generate.
        at: where members meet.
        runs: one after another; as many servers and workers in each.
    """
    torch.set_num_threads(1)
    rank, first = int(os.environ["RANK"]), runs[0]
    if rank < first.servers:
        for number, settings in enumerate(runs):
            serve(at, job=f"sparse {number}", timeout=settings.timeout, number=rank)
        return []
    worker = rank - first.servers
    rows = examples(source, first.features, (worker, first.workers))
    found = []
    for number, settings in enumerate(runs):
        if worker == 0:
            tell(Progress(number))
        terms = WorkerTerms(at, f"sparse {number}", worker, timeout=_MEET_S, wait=settings.timeout)
        found.append(solve(terms, settings, rows))
    return found


def in_processes(
    source: Path | Generated,
    runs: Sequence[SparseSettings],
    on_run: Callable[[int], None] | None = None,
) -> list[Solved]:
    """All runs, one after another, in the same processes.

    Args:
        source, runs: as :func:`main`.
        on_run: told the number of each run as it begins.

    Raises:
        RankFailed, KeyboardInterrupt: as :func:`commlib.bench.launch.processes.run_ranks`.
    """

    def said(_: int, message: object) -> None:
        if on_run is not None and isinstance(message, Progress):
            on_run(message.run)

    meeting = rendezvous.keep("127.0.0.1")  # until all have gone
    at, servers = f"127.0.0.1:{meeting.port}", runs[0].servers
    ranks = run_ranks(main, servers + runs[0].workers, (source, at, tuple(runs)), on_message=said)
    return [Solved.of([worker[i] for worker in ranks[servers:]]) for i in range(len(runs))]
