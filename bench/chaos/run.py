"""Trainings with a parameter server whose processes are killed at random moments, and what must be true of the end.

Every worker counts: its gradient is 1 at its own place and its step's number at another. What the values are in the
end says how many of its pushes are in, and whether one is in twice or another instead of it.

    python -m commlib.bench.chaos --runs 100      # kill -9 of shards and workers, stops (SIGSTOP), newcomers
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import commlib
from commlib.server.membership import rendezvous
from commlib.server.shard.serve import serve

PLACES, CHUNKS, STEPS = 16, 5, 150
DEADLINE = 90.0


class Counter(nn.Module):
    """Parameters that are counted in; several, so that there are chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.zeros(256, dtype=torch.float64)) for _ in range(CHUNKS))

    def forward(self, place: int, step: int) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for row in self.rows:
            total = total + row[place] + (step + 1) * row[PLACES + place]
        return total


def shard(address: str, quiet: bool) -> None:
    """A shard's process."""
    _log(quiet)
    with contextlib.suppress(commlib.CommlibError):
        serve(address, timeout=DEADLINE)


def worker(quiet: bool, patience_s: float, pipe: Connection, *given: Any) -> None:
    """A worker's process, which counts as it is given (:func:`count`)."""
    _log(quiet)
    count(pipe.send, *given, patience_s=patience_s)


def count(
    tell: Callable[[tuple[str, Any]], None],
    address: str,
    place: int,
    rank: int | None,
    workers: int,
    shards: int,
    spec: str,
    seed: int,
    *,
    steps: int = STEPS,
    pace_s: float = 0.08,
    endpoint: str = "zmq",
    patience_s: float = 2.0,
) -> None:
    """Train as one worker.

    Args:
        tell: is told what it has pushed and seen, and in the end its values.
        address: where members meet.
        place: this worker's own, of the places that are counted at.
        rank: of one that is there from the start; None: it comes late.
        workers, shards: that begin.
        spec: rule of consistency.
        seed: of its pauses.
        steps: that it takes.
        pace_s: seconds of a pause between two steps, at most.
        endpoint: how members are reached.
        patience_s: seconds of silence that are death.
    """
    draw, model = random.Random(seed), Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    server = commlib.ParameterServer(
        model,
        optimizer,
        spec,
        address,
        mean=False,
        copies=2,
        workers=workers,
        shards=shards,
        rank=rank,
        late=rank is None,
        patience=patience_s,
        nbytes=1024,
        timeout=DEADLINE,
        endpoint=endpoint,
    )
    with server:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(place, step)  # what was pushed before is in what is read: nobody may lose it now
            tell(("seen", step))
            loss.backward()
            server.step()
            tell(("pushed", step + 1))
            time.sleep(draw.random() * pace_s)
    tell(("values", [row.tolist() for row in model.rows]))


@dataclasses.dataclass
class WorkerReport:
    """Message of a worker: how far it is, and what it has seen.

    Args:
        seen: its pushes that were surely in.
        pushed: its pushes.
        values: in the end; None if it was killed before.
    """

    seen: int = 0
    pushed: int = 0
    values: list[list[float]] | None = None

    def take(self, pipe: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while pipe.poll():
                what, value = pipe.recv()
                setattr(self, what, value)


def check(reports: Mapping[int, WorkerReport], killed: Collection[int], size: int, steps: int, told: str) -> None:
    """Hold what workers ended with against what they did.

    Args:
        reports: place of each worker → its own.
        killed: places of those that were.
        size: how many began; the others came late.
        steps: that each takes.
        told: what happened, for the error.

    Raises:
        AssertionError: a push is lost, or in twice; or a survivor did not end well.
    """
    survivors = {place: seen for place, seen in reports.items() if place not in killed}
    assert all(s.values is not None for s in survivors.values()), f"a survivor did not end well: {told}"
    # Who came late does its steps later: others have left before, without what it did then.
    final = min((s.values for s in survivors.values() if s.values is not None), key=lambda rows: sum(rows[0]))
    for place, seen in survivors.items():
        if len(reports) > size:
            break
        assert seen.values == final, f"worker {place} ended with other values: {told}"
    for place, seen in reports.items():
        for row in final:
            count, total = -int(row[place]), -int(row[PLACES + place])
            least, most = (steps, steps) if place in survivors else (seen.seen, seen.pushed + 1)
            which = f"{count} pushes of worker {place} are in, {least} to {most} should be: {told}"
            assert least <= count <= most, which
            assert total == count * (count + 1) // 2, f"not the first {count} of worker {place}: {told}"


class ChaosRun:
    """Training with accidents drawn from a seed.

    Args:
        seed: of the accidents.
        quiet: whether members keep their log to themselves.
        patience_s: seconds of silence that are death; a member that stops does so for longer.
    """

    def __init__(self, seed: int, *, quiet: bool = True, patience_s: float = 2.0) -> None:
        self._draw, self._quiet, self._patience_s = random.Random(seed), quiet, patience_s
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "torch._dynamo"])  # the first optimizer imports that
        self._shards: list[Any] = []
        self._workers: list[tuple[int, Any, Connection, WorkerReport]] = []
        self._killed: set[int] = set()
        self.spec = self._draw.choice(["ssp:3", "asp", "bsp"])
        self.events: list[str] = []

    def go(self) -> None:
        """Run the training to its end.

        Raises:
            AssertionError: what must be true is not.
        """
        store = rendezvous.keep("127.0.0.1")
        self._address = f"127.0.0.1:{store.port}"
        try:
            self._size = self._draw.choice([2, 3])
            for _ in range(3):
                self._start_shard()
            for rank in range(self._size):
                self._start_worker(rank)
            self._accidents()
            self._await_end()
            self._check()
        finally:
            for process in [*self._shards, *(p for _, p, _, _ in self._workers)]:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
            del store

    def _start_shard(self) -> None:
        process = self._context.Process(target=shard, args=(self._address, self._quiet))
        process.start()
        self._shards.append(process)

    def _start_worker(self, rank: int | None) -> None:
        place, (ours, theirs) = len(self._workers), self._context.Pipe()
        given = self._address, place, rank, self._size, 3, self.spec, self._draw.randrange(1 << 30)
        process = self._context.Process(target=worker, args=(self._quiet, self._patience_s, theirs, *given))
        process.start()
        theirs.close()
        self._workers.append((place, process, ours, WorkerReport()))

    def _hear(self) -> None:
        for _, _, pipe, seen in self._workers:
            seen.take(pipe)

    def _until(self, step: int) -> None:
        """Wait until some worker has come so far."""
        end = time.monotonic() + DEADLINE
        while not any(seen.pushed >= step or seen.values is not None for *_, seen in self._workers):
            assert time.monotonic() < end, f"nobody comes to step {step}: {self._told()}"
            time.sleep(0.005)
            self._hear()

    def _accidents(self) -> None:
        """A shard at a time, for there are two copies; between two, time to make the lost one good."""
        for step in sorted(self._draw.sample(range(2, STEPS - 10), 2)):
            self._until(step)
            time.sleep(self._draw.random() * 0.05)
            what = self._draw.choice(["shard", "shard", "worker", "stop", "both"])
            living = [p for p in self._shards if p.is_alive()]
            if what in ("shard", "both") and len(living) > 2:
                self._kill(self._draw.choice(living), f"a shard at step {step}")
                if self._draw.random() < 0.7:
                    self._start_shard()
                    self.events.append("a shard came")
            if what in ("worker", "both") and not self._killed:
                place, process, _, _ = self._draw.choice(self._workers)
                if self._kill(process, f"worker {place} at step {step}"):
                    self._killed.add(place)
                if place in self._killed and self._draw.random() < 0.5:
                    self._start_worker(None)
                    self.events.append(f"worker {len(self._workers) - 1} came late")
            if what == "stop" and len(living) > 2:
                self._freeze(self._draw.choice(living))
            time.sleep(self._patience_s + 2.0)

    def _kill(self, process: Any, what: str) -> bool:
        """Whether it was it that ended the process, and not the process itself just before."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode != -signal.SIGKILL:
            return False
        self.events.append(f"killed {what}")
        return True

    def _freeze(self, process: Any) -> None:
        """Given up, and then it goes on, and does not know it."""
        seconds = self._patience_s + 2.0
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGCONT)
        self.events.append(f"stopped a shard for {seconds:g} s")

    def _await_end(self) -> None:
        end = time.monotonic() + DEADLINE
        while any(p.is_alive() for p in [*self._shards, *(p for _, p, _, _ in self._workers)]):
            assert time.monotonic() < end, f"it does not end: {self._told()}"
            time.sleep(0.02)
            self._hear()
        self._hear()

    def _check(self) -> None:
        check({place: seen for place, *_, seen in self._workers}, self._killed, self._size, STEPS, self._told())

    def _told(self) -> str:
        workers = [f"worker {p}: pushed {s.pushed}, seen {s.seen}" for p, _, _, s in self._workers]
        return f"{self.spec}, {', '.join(self.events) or 'nothing happened'}; {'; '.join(workers)}"


def _log(quiet: bool) -> None:
    torch.set_num_threads(1)
    if not quiet:
        logging.basicConfig(level=logging.INFO, format=f"{os.getpid()} %(message)s")
