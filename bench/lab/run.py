"""Run one command on every rank of a lab, and follow a schedule meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait

from commlib.bench.launch.processes import signal_session

from .events import Event
from .lab import Lab
from .namespaces import LabError

_SETTLE_S = 1.0  # after a first failure, so long may others report theirs
_KILLED_S = 0.5  # what was on a host when it was told to die has done so by then
_FAREWELL_S = 5.0  # so long may ranks take to end after a signal, before the lab is taken from under them


def run_command(
    lab: Lab, argv: Sequence[str], schedule: Sequence[Event] = (), *, on_event: Callable[[Event], None] | None = None
) -> list[int | None]:
    """Run ``argv`` once per rank, with torchrun's environment, and wait for all of them.

    When a rank fails the others are told to end (SIGTERM), and so they are (SIGINT) when this process is
    interrupted; what has not ended five seconds later is killed.

    Args:
        lab: where; it stays up.
        argv: the command; its standard input is empty, its output is this process's.
        schedule: events in the order of time.
        on_event: called with each one after it was carried out.

    Returns:
        Exit status by rank as ``subprocess`` gives it (−N: killed by signal N); None: ended here, because another
        had failed.

    Raises:
        KeyboardInterrupt: this process was; the ranks have ended.
    """
    port = lab.start()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(lab.world_size):
            env = {**os.environ, **lab.environment(rank, port)}
            command = [*lab.prefix(rank), *argv]
            ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True))
        _follow(lab, ranks, schedule, on_event)
        return _statuses(lab, ranks)
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):  # a second one: at once
            _end(lab, ranks, signal.SIGINT)
        raise
    finally:
        _kill(lab, ranks)


def _follow(
    lab: Lab,
    ranks: Sequence[subprocess.Popen[bytes]],
    schedule: Sequence[Event],
    on_event: Callable[[Event], None] | None,
) -> None:
    """Carry the schedule out until every rank has ended, or one has failed."""
    began = time.monotonic()
    todo = list(schedule)
    while running := [p for p in ranks if p.poll() is None]:
        if any(p.returncode for p in ranks if p.returncode is not None):
            return
        left = None
        if todo and (left := began + todo[0].at - time.monotonic()) <= 0:
            event = todo.pop(0)
            event.apply(lab)
            if on_event is not None:
                on_event(event)
            continue
        _wait_for_one(running, left)


def _statuses(lab: Lab, ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    until = time.monotonic() + _SETTLE_S
    while (left := until - time.monotonic()) > 0 and (running := [p for p in ranks if p.poll() is None]):
        _wait_for_one(running, left)
    statuses = [p.poll() for p in ranks]
    if None in statuses:
        _end(lab, ranks, signal.SIGTERM)
    return statuses


def _end(lab: Lab, ranks: Sequence[subprocess.Popen[bytes]], signum: int) -> None:
    lab.signal(signum)
    until = time.monotonic() + _FAREWELL_S
    while (left := until - time.monotonic()) > 0 and (running := [p for p in ranks if p.poll() is None]):
        _wait_for_one(running, left)


def _kill(lab: Lab, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End everything on the hosts, and those ranks that were still on their way into theirs."""
    with contextlib.suppress(LabError):  # the lab itself was taken down: they ended with it
        lab.signal(signal.SIGKILL)
    until = time.monotonic() + _KILLED_S
    for process in ranks:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            signal_session(process, signal.SIGKILL)
            process.wait()


def _wait_for_one(processes: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> None:
    """Wait until one of them has ended; no polling."""
    with _pidfds(processes) as fds:
        wait(fds, timeout)


@contextlib.contextmanager
def _pidfds(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    fds: list[int] = []
    try:
        fds += [os.pidfd_open(p.pid) for p in processes]
        yield fds
    finally:
        for fd in fds:
            os.close(fd)
