"""A parameter server whose members are threads of the test's process: a meeting place, shards, workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

import commlib
from commlib.server.membership import rendezvous
from commlib.server.membership.registry import MembershipStore
from commlib.server.shard.serve import serve
from commlib.server.storage.snapshot_policy import Snapshots

TIMEOUT = 60.0
HANG_S = 240.0
"""Only what hangs takes so long. Members with a longer time-out cannot be what ended a wait that did end."""


def until(true: Callable[[], bool]) -> None:
    """Waits for it."""
    end = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.02)


class Cluster:
    """With so many shards.

    Args:
        shards: that come at once.
        workers: that begin.
        endpoint: how members are reached.
        timeout: seconds that anything waits.
        snapshots: where shards save their state.
        options: of every worker's :class:`commlib.ParameterServer`; by default, none is ever given up for silence, for
            all are threads of one process, which a busy machine may stop for a while.
    """

    def __init__(
        self,
        shards: int,
        workers: int,
        endpoint: str = "inproc",
        timeout: float = TIMEOUT,
        snapshots: Snapshots | None = None,
        **options: Any,
    ) -> None:
        self._store = rendezvous.keep("127.0.0.1")
        self.address = f"127.0.0.1:{self._store.port}"
        self.workers, self._shards, self._endpoint, self._timeout = workers, shards, endpoint, timeout
        self._options = {"patience": 60.0, **options}
        self._threads: list[threading.Thread] = []
        self.stops: list[threading.Event] = []
        self.ends: list[str] = []
        """Why each shard has ended."""
        self._came: list[str] = []
        for _ in range(shards):
            self.shard(snapshots)

    def shard(self, snapshots: Snapshots | None = None) -> threading.Event:
        """One more comes; what it returns makes it leave."""
        stop = threading.Event()

        def run() -> None:
            try:
                why = serve(
                    self.address,
                    endpoint=self._endpoint,
                    timeout=self._timeout,
                    snapshots=snapshots,
                    stop=stop,
                    ready=self._came.append,
                )
                self.ends.append(why)
            except commlib.CommlibError as e:
                self.ends.append(f"{type(e).__name__}: {e}")

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        self.stops.append(stop)
        return stop

    def await_job(self) -> None:
        """Until a worker has said what is to be trained."""
        MembershipStore(rendezvous.visit(self.address, "default", self._timeout), self._timeout).job(self._timeout)

    def shards_in_use(self) -> int:
        """How many shards of the newest view own values."""
        roll = MembershipStore(rendezvous.visit(self.address, "default", self._timeout), self._timeout)
        return len({name for owners in roll.epoch(roll.newest()).view.places.values() for name in owners})

    def await_shards(self) -> None:
        """Until all can be seen."""
        until(lambda: len(self._came) == len(self._threads))

    def join(
        self, model: nn.Module, optimizer: Optimizer, rank: int | None, spec: str = "bsp", **options: Any
    ) -> commlib.ParameterServer:
        """A worker comes: one of the first, or (None) a latecomer."""
        given = {"timeout": self._timeout, **self._options, **options}
        return commlib.ParameterServer(
            model,
            optimizer,
            spec,
            self.address,
            workers=self.workers,
            rank=rank,
            late=rank is None,
            shards=self._shards,
            endpoint=self._endpoint,
            **given,
        )

    def train(self, worker: Callable[[int], Any]) -> list[Any]:
        """What ``worker(rank)`` returns or raises in a thread for each rank; the first error is raised here."""
        results = self.outcomes(worker)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def outcomes(self, worker: Callable[[int], Any]) -> list[Any]:
        """The same, with errors in place of results."""
        results: list[Any] = [None] * self.workers

        def run(rank: int) -> None:
            try:
                results[rank] = worker(rank)
            except BaseException as e:
                results[rank] = e

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), "a worker hangs"
        return results

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        for stop in self.stops:
            stop.set()
        for thread in self._threads:
            thread.join(HANG_S if error is None else 1.0)
            assert error is not None or not thread.is_alive(), "a shard hangs"
