"""Processes for tests, forked from one that has imported PyTorch: each takes 10 ms of a core to start, not 2 s.

Nothing else changes. A rank has an environment, a session and a process id of its own, runs what it would run, and how
it ends is known. What is imported beforehand reads no environment, and starts no thread.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import commlib
from commlib.bench.launch import processes
from commlib.bench.launch.child import BOOTSTRAP

_PRELOAD = (
    *("torch", "torch._dynamo", "commlib", "commlib.bench.trainer.worker", "pytest", "hypothesis"),
    *sorted(set(commlib._HOME.values())),
)
"""A first optimizer imports the second; test modules, in which jobs are found, pytest and hypothesis."""


def context() -> Any:
    """For ``Process`` and ``Pipe``, whose processes are forked from the server."""
    begin()
    return multiprocessing.get_context("forkserver")


def begin() -> None:
    """Start the server unless it runs, without waiting for what it imports.

    What its processes print goes into a file of the temporary folder (:func:`printed`), unless they have it elsewhere:
    the server outlives the test that starts it, and so would a place in the output of that test.
    """
    if server() is not None:
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))
    ours = {fd: os.dup(fd) for fd in (1, 2)}
    log = os.open(_log(), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for fd in ours:
            os.dup2(log, fd)
        forkserver.ensure_running()
    finally:
        os.close(log)
        for fd, kept in ours.items():
            os.dup2(kept, fd)
            os.close(kept)


def printed() -> str:
    """The last that forked processes have printed."""
    return _log().read_text(errors="replace")[-3000:] if _log().exists() else ""


def _log() -> Path:
    return Path(tempfile.gettempdir()) / f"forked-{os.getpid()}.log"


def server() -> int | None:
    """The process id of the one that they are forked from, once there is one."""
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined, no-any-return]


class Rank:
    """As much of a ``subprocess.Popen`` as :mod:`commlib.bench.launch.processes` asks of one.

    Args:
        link, env: as ``launch.start`` has them.
        first: picklable; what the process does before anything else.
    """

    def __init__(self, link: int, env: Mapping[str, str], first: Callable[[], None] | None = None) -> None:
        with Connection(os.dup(link)) as here, Connection(os.dup(2)) as said:  # what travels to another process
            self._process = context().Process(target=_become, args=(here, said, dict(env), first))
            self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """0, an error's number, or minus a signal's; None while it runs."""
        return self._process.exitcode  # type: ignore[no-any-return]

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self.returncode


def start(prefix: Sequence[str], link: int, env: Mapping[str, str]) -> Any:
    """In the place of ``launch.start``. What is to run under a prefix (on an emulated host) is started anew."""
    return _ANEW(prefix, link, env) if prefix else Rank(link, env)


_ANEW = processes.start


def _become(link: Connection, said: Connection, env: dict[str, str], first: Callable[[], None] | None) -> None:
    os.setsid()
    if first is not None:
        first()
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # read when PyTorch was imported, elsewhere
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    sys.argv = ["-c", str(os.dup(link.fileno()))]
    link.close()
    exec(BOOTSTRAP, {"__name__": "__main__"})
