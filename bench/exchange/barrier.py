"""A place where all ranks stand still while the parent reads what the interfaces have counted.

The ranks must not meet over the network: a barrier's own packets would be counted. So each tells the
parent that it has come, through the socket they share, and waits at a pipe of its own, whose name holds in
every network namespace, until the parent lets all of them on.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

import torch.distributed as dist

from commlib.bench.launch.child import tell

R = TypeVar("R")
_READINGS = 50  # so often at most, until two agree: an acknowledgement may be 40 ms late


class Arrived:
    """A rank's message: it stands at the gate."""


class Gate(Generic[R]):
    """The parent's side; a context manager.

    Args:
        ranks: how many must come before any goes on.
        read: taken whenever all have come, again and again until two readings agree.
    """

    def __init__(self, ranks: int, read: Callable[[], R]) -> None:
        self._ranks, self._read = ranks, read
        self._waiting = 0
        self._folder = tempfile.TemporaryDirectory(prefix="commlib-gate-")
        self.path = Path(self._folder.name)
        self._pipes = []
        for rank in range(ranks):
            os.mkfifo(self.path / str(rank))
            self._pipes.append(os.open(self.path / str(rank), os.O_RDWR))
        self.readings: list[R] = []
        """One for each time all ranks stood still."""

    def arrive(self) -> None:
        """Another rank has come; the last one opens the gate."""
        self._waiting += 1
        if self._waiting == self._ranks:
            self.readings.append(_settled(self._read))
            self._waiting = 0
            for pipe in self._pipes:
                os.write(pipe, b".")

    def __enter__(self) -> Gate[R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._folder.cleanup()


def stand_still(gate: Path | None) -> None:
    """Wait, inside a rank, until all ranks have come here; None (no parent) makes it a barrier.

    ``gate`` is :attr:`Gate.path`. A rank waits no longer than its parent lives, and the parent ends all ranks
    when one of them fails.
    """
    if gate is None:
        dist.barrier()
        return
    pipe = os.open(gate / os.environ["RANK"], os.O_RDWR)  # opens at once, whoever else has it open
    try:
        tell(Arrived())
        os.read(pipe, 1)
    finally:
        os.close(pipe)


def _settled(read: Callable[[], R]) -> R:
    last = read()
    for _ in range(_READINGS):
        now = read()
        if now == last:
            break
        last = now
    return last
