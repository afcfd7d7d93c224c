"""Real ranks for tests: processes started once, each job joining a fresh Gloo process group of its own.

A job is a module-level function ``job(world, *args)`` run by every rank; what the ranks return comes back in
rank order, and the first error of any of them is raised here with its traceback.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import io
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.distributed as dist

from commlib.groups.world import World
from tests.support import forked_ranks

PIDS: set[str] = set()
"""Rank processes alive between tests, which are no leak."""


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


class Fleet:
    """Up to four rank processes."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []

    def run(
        self, size: int, job: Callable[..., Any], *args: Any, deadline: float = 240.0, backend: str = "gloo"
    ) -> list[Any]:
        """Runs ``job(World, *args)`` on ranks 0..size−1.

        Raises:
            RankFailed: some rank raised, died, or was not done by the deadline (seconds).
        """
        self._start(size)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(size):
                self._ranks[rank][1].send((job.__module__, job.__qualname__, rank, size, folder, backend, _dump(args)))
            return self._collect(size, time.monotonic() + deadline)

    def close(self) -> None:
        """Ends the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
            PIDS.discard(str(process.pid))
        self._ranks = []

    def _start(self, size: int) -> None:
        context = forked_ranks.context()
        while len(self._ranks) < size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, forked_ranks.address()), daemon=True)
            process.start()
            theirs.close()
            PIDS.add(str(process.pid))
            self._ranks.append((process, ours))

    def _where(self, rank: int) -> str:
        """What a rank does that is not done in time: its threads' stacks, among the last words of all."""
        os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return f"not done by the deadline; last words of all ranks:\n{forked_ranks.printed()}"

    def _collect(self, size: int, end: float) -> list[Any]:
        pipes: dict[Any, int] = {self._ranks[r][1]: r for r in range(size)}
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                errors.update({rank: self._where(rank) for rank in pipes.values()})
                break
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    ok, value = cast(Connection, pipe).recv()
                except EOFError:
                    ok, value = False, f"the process died; last words of all ranks:\n{forked_ranks.printed()}"
                (results if ok else errors)[rank] = _load(value) if ok else value
            if errors:
                end = min(end, time.monotonic() + 20)  # the others may only be waiting for it
        if errors:
            self.close()
            raise RankFailed("\n".join(f"rank {r}: {e}" for r, e in sorted(errors.items())))
        return [results[r] for r in range(size)]


def nothing(world: World) -> None:
    """A job for ranks that are only to be there."""


def _serve(pipe: Connection, at: str) -> None:
    forked_ranks.known(at)
    faulthandler.register(signal.SIGUSR1)
    before = dict(os.environ)
    gc.freeze()  # PyTorch's modules need no looking through after each job
    warnings.simplefilter("ignore")
    with contextlib.suppress(EOFError):
        while True:
            module, name, rank, size, folder, backend, args = pipe.recv()
            torch.set_num_threads(1)  # a job's libraries may have set another number, and environment variables
            os.environ.clear()
            os.environ.update(before)
            try:
                job = getattr(importlib.import_module(module), name)
                store = torch._C._distributed_c10d.FileStore(os.path.join(folder, "store"), size)
                timeout = datetime.timedelta(seconds=60)
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
                try:
                    result = job(World(rank, size), *_load(args))
                    dist.barrier()
                finally:
                    dist.destroy_process_group()
                pipe.send((True, _dump(result)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
            gc.collect()


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
