"""Processes for tests, forked from one that has imported PyTorch: each takes 10 ms of a core to start, not 2 s.

Nothing else changes. A rank has an environment, a session and a process id of its own, runs what it would run, and how
it ends is known. What is imported beforehand reads no environment, and starts no thread.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing.process
import os
import re
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
from commlib.cli.main import main
from commlib.server.worker import embedded

_PRELOAD = (
    *("torch", "torch._dynamo", "commlib", "commlib.bench.trainer.worker", "pytest", "hypothesis"),
    *("sklearn.datasets", "sklearn.model_selection", "torch.profiler", "torch.distributed.run", "accelerate"),
    "commlib.bench.cli",
    *("commlib.cli.main", "commlib.cli.server"),
    *sorted(set(commlib._HOME.values())),
    "tests.support.warm_codecs",
)
"""A first optimizer imports the second; test modules, in which jobs are found, pytest and hypothesis; the task "digits"
scikit-learn. The last is ours, and where the server does not find one of them, processes are only slower."""


def context() -> Any:
    """For ``Process`` and ``Pipe``, whose processes are forked from the server."""
    begin()
    return multiprocessing.get_context("forkserver")


def begin() -> None:
    """Start the server unless it runs, without waiting for what it imports.

    What its processes print goes into a file of the temporary folder (:func:`printed`), unless they have it elsewhere:
    the server outlives the test that starts it, and so would a place in the output of that test.
    """
    if _server._forkserver_address is not None:
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
    return _server._forkserver_pid  # type: ignore[no-any-return]


class Forked:
    """As much of a ``subprocess.Popen`` as commlib asks of one.

    Args:
        run: called in the process, which has a session of its own.
        given: its arguments; picklable, as it is.
        env: environment variables of the process.
        out: where what it prints goes to.
        first: picklable; what the process does before anything else, and all that it starts.
    """

    def __init__(
        self,
        run: Callable[..., None],
        given: Sequence[Any],
        env: Mapping[str, str],
        out: int = 1,
        first: Callable[[], None] | None = None,
    ) -> None:
        with Connection(os.dup(out)) as told, Connection(os.dup(2)) as said:  # what travels to another process
            args = (told, said, dict(env), address(), first, run, given)
            self._process = context().Process(target=_become, args=args)
            self._process.start()
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]  # no exit waits for it
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
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()


class Rank(Forked):
    """Rank, in the place of what ``launch.start`` starts.

    Args:
        link, env: as ``launch.start`` has them.
        first: as :class:`Forked` has it.
    """

    def __init__(self, link: int, env: Mapping[str, str], first: Callable[[], None] | None = None) -> None:
        with Connection(os.dup(link)) as here:
            super().__init__(_rank, (here,), env, out=2, first=first)


def start(prefix: Sequence[str], link: int, env: Mapping[str, str]) -> Any:
    """In the place of ``launch.start``; a rank on an emulated host is forked, too, and goes there by itself.

    It has the host's network and cores, but is none of its processes: ``Lab.signal`` does not reach it.
    """
    if not prefix:
        return Rank(link, env)
    first = entering(prefix)
    return _ANEW(prefix, link, env) if first is None else Rank(link, env, first)


def entering(prefix: Sequence[str]) -> Callable[[], None] | None:
    """What takes a forked process to the emulated host of a rank with this prefix (``Lab.prefix``). None without root:
    there, what owns the network would have to be entered first.
    """
    named = re.search(r"--net=(/proc/\d+)/ns/net .* ip netns exec (\w+) .* --cpu-list ([\d,]+) ", " ".join(prefix))
    if named is None or "--user=" in " ".join(prefix):
        return None
    keeper, host, cores = named.groups()
    network = Path(keeper, "root", "run", "netns", host)  # as the keeper of the lab sees it
    return functools.partial(_enter, network, [int(c) for c in cores.split(",")])


def _enter(network: Path, cores: Sequence[int]) -> None:
    """Become a process of a host of a lab: its network, its cores, a batch process."""
    fd = os.open(network, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {network}")
    os.close(fd)
    os.sched_setaffinity(0, cores)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def shard(command: Sequence[str], env: Mapping[str, str], first: Callable[[], None] | None = None) -> Any:
    """In the place of what starts a shard of embedded servers: ``python -m commlib …``."""
    return Forked(main, (list(command[3:]),), env, first=first)


_CLONE_NEWNET = 0x40000000
_ANEW = processes.start
_server: Any = forkserver._forkserver


def known(at: str, first: Callable[[], None] | None = None) -> None:
    """In a process that was forked: its shards are forked by the same server, which is at this address."""
    _server._forkserver_address, _server.ensure_running = at, lambda: None
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # one may start none
    embedded.start = functools.partial(shard, first=first)


def address() -> str:
    """Where the server is asked, for :func:`known`."""
    begin()
    return _server._forkserver_address  # type: ignore[no-any-return]


def _become(
    told: Connection,
    said: Connection,
    env: dict[str, str],
    at: str,
    first: Callable[[], None] | None,
    run: Callable[..., None],
    given: Sequence[Any],
) -> None:
    os.setsid()
    if first is not None:
        first()
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # read when PyTorch was imported, elsewhere
    os.dup2(told.fileno(), 1)
    os.dup2(said.fileno(), 2)
    known(at, first)
    run(*given)


def _rank(link: Connection) -> None:
    sys.argv = ["-c", str(os.dup(link.fileno()))]
    link.close()
    exec(BOOTSTRAP, {"__name__": "__main__"})
