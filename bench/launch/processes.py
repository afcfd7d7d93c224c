"""Start local ranks, watch them, and leave none behind.

:func:`run_ranks` runs one function in several processes that find each other exactly as under
``torchrun``: ``torch.distributed.init_process_group(backend)`` is all they call. The parent holds the
rendezvous store on a port the system chose, so there is no free port to guess and to lose.

Each rank and the parent share one socket. It brings the function and its arguments, takes messages and
the result back, and tells a rank that its parent has gone: however the parent dies, the socket closes and
the rank ends. Needs POSIX.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

import torch.distributed as dist

from commlib.errors import CommlibError

from .child import BOOTSTRAP

_SETTLE_S = 0.3  # after a first failure, so long may a better reason still arrive
_EXIT_S = 20.0  # so long may a rank take to exit after it has handed in its result


class RankFailed(CommlibError):
    """A rank raised or died; all others were ended.

    Attributes:
        rank: which one.
        error: what it raised, where that could be carried over; None if it died without a word.
        trace: its traceback as text, or "".
    """

    def __init__(self, rank: int, message: str, *, error: BaseException | None = None, trace: str = "") -> None:
        super().__init__(f"rank {rank} {message}")
        self.rank = rank
        self.error = error
        self.trace = trace


class Terminated(SystemExit):
    """SIGTERM reached the parent; uncaught it ends the program with status 143, as a shell would say it."""


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_ranks(
    target: Callable[..., Any],
    world_size: int,
    args: Sequence[object] = (),
    *,
    env: Callable[[int], Mapping[str, str]] | None = None,
    prefix: Callable[[int], Sequence[str]] | None = None,
    on_message: Callable[[int, Any], None] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call ``target(*args)`` in ``world_size`` new processes and return what each returned, by rank.

    The ranks' stdout is joined to stderr, so that the parent's stdout stays its own. Ctrl-C and SIGTERM
    are the parent's business: the ranks do not see them, it ends them and raises.

    Args:
        target: a function of an importable module (not of ``__main__``).
        args: picklable; results and messages must be picklable too.
        env: more environment variables for a rank, winning over the defaults. With ``MASTER_ADDR`` in them the
            rank of that address holds the store, as where no agent does.
        prefix: words put before a rank's command line, as those that enter another network namespace.
        on_message: called with (rank, message) for every :func:`.child.tell` of a rank.
        timeout: seconds after which the ranks are ended.

    Raises:
        ValueError: ``world_size`` below 1, or a target that other processes cannot import.
        RankFailed: a rank raised or died.
        TimeoutError: not done in ``timeout``.
        KeyboardInterrupt, Terminated: the parent was told to stop (only seen from the main thread).
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if getattr(target, "__module__", None) == "__main__":
        raise ValueError(f"{target.__qualname__} is defined in the script itself: move it to a module ranks can import")
    job = pickle.dumps((target, tuple(args)))
    deadline = None if timeout is None else time.monotonic() + timeout
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    ranks: list[_Rank] = []
    with sigterm_raises():
        try:
            for r in range(world_size):
                environment = {**_environment(r, world_size, store.port), **(env(r) if env else {})}
                ranks.append(_Rank(r, environment, prefix(r) if prefix else ()))
            for rank in ranks:
                rank.hand_over(job)
            return _collect(ranks, on_message, deadline)
        finally:
            _end(ranks)
            del store


class _Rank:
    """Process of one rank, and the socket to it."""

    def __init__(self, rank: int, env: Mapping[str, str], prefix: Sequence[str]) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        try:
            self.process = start(prefix, theirs.fileno(), {**os.environ, **env})
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.link = Connection(ours.detach())
        self.open = True
        self.done = False
        self.result: Any = None
        self.failure: tuple[float, BaseException | None, str, str] | None = None

    def hand_over(self, job: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: _collect will say so
            self.link.send(sys.path)
            self.link.send_bytes(job)

    def receive(self, on_message: Callable[[int, Any], None] | None) -> None:
        try:
            kind, value = self.link.recv()
        except (EOFError, OSError):
            self.open = False
            return
        if kind == "message":
            if on_message is not None:
                on_message(self.rank, value)
        elif kind == "result":
            self.done, self.result = True, pickle.loads(value)
        else:
            when, pickled, text, trace = value
            self.failure = (when, _unpickled(pickled), text, trace)

    def failed(self) -> RankFailed | None:
        """Why this rank will give no result, or None."""
        if self.failure is not None:
            _, error, text, trace = self.failure
            return RankFailed(self.rank, f"failed: {text}", error=error, trace=trace)
        if self.open or self.done:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_SETTLE_S)
        code = self.process.returncode
        if code is not None and code < 0:
            why = f"was killed by {signal.Signals(-code).name}"
            return RankFailed(self.rank, why + (" (out of memory?)" if -code == signal.SIGKILL else ""))
        return RankFailed(self.rank, f"ended without a result (exit code {code})")


def start(prefix: Sequence[str], link: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A rank's process, which finds its job at a socket.

    Args:
        prefix: words put before its command line.
        link: the socket's file descriptor, which the process gets too.
        env: all of its environment.
    """
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", BOOTSTRAP, str(link)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=(link,),
        start_new_session=True,  # Ctrl-C in the terminal goes to the parent alone
    )


def _collect(ranks: list[_Rank], on_message: Callable[[int, Any], None] | None, deadline: float | None) -> list[Any]:
    while not all(r.done for r in ranks):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            waiting = ", ".join(str(r.rank) for r in ranks if not r.done)
            raise TimeoutError(f"rank {waiting} gave no result in time; all ranks were ended")
        _receive_all(ranks, on_message, left)
        if any(r.failed() for r in ranks):
            until = time.monotonic() + _SETTLE_S
            while (left := until - time.monotonic()) > 0 and any(r.open for r in ranks):
                _receive_all(ranks, on_message, left)
            raise _reason(ranks)
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(_EXIT_S)
    return [r.result for r in ranks]


def _receive_all(ranks: list[_Rank], on_message: Callable[[int, Any], None] | None, timeout: float | None) -> None:
    ready = wait([r.link for r in ranks if r.open], timeout)
    for rank in ranks:
        if rank.link in ready:
            rank.receive(on_message)


def _reason(ranks: list[_Rank]) -> RankFailed:
    """The failure that came first: a death without a word, else the earliest error (others lost a peer by it)."""
    failures = [f for r in ranks if (f := r.failed())]
    silent = [f for f in failures if not f.trace]
    return silent[0] if silent else min(failures, key=lambda f: (ranks[f.rank].failure or (0.0,))[0])


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.link.close()  # the rank's watcher ends it
        if rank.process.poll() is None:
            signal_session(rank.process, signal.SIGTERM)
    deadline = time.monotonic() + 3.0
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            signal_session(rank.process, signal.SIGKILL)
            rank.process.wait()


def signal_session(process: subprocess.Popen[bytes], signum: int) -> None:
    """Signal a process that was started with ``start_new_session`` and what it started, as a prefix does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Environment that torchrun sets for a rank whose agent holds the store; threads share the cores."""
    lo = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    ifname = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", lo)} if lo else {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // world_size))),
        **ifname,
    }


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Inside, SIGTERM raises :class:`Terminated` in the main thread; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Terminated(128 + signum)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unpickled(data: bytes | None) -> BaseException | None:
    if data is None:
        return None
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None
