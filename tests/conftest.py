"""What holds for every test: nothing it starts outlives it, one torch thread, GPU tests skip without a GPU."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from commlib.bench.lab import Lab, unavailable
from commlib.cli import main
from fleet import PIDS, Fleet
from turns import shares, turn

_PATIENCE = 5.0  # seconds that what a test started may take to go away by itself
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # Python keeps them until it exits

# A test that starts processes shares two cores with them: a deadline would measure the machine.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("few", settings.get_profile("ci"), max_examples=5)
settings.load_profile("ci" if os.environ.get("CI") else "local")

torch.set_num_threads(1)

# A shell that starts the tests in the background has them, and all they start, ignore Ctrl-C; some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest-timeout's: to wait is not to run
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    alone = [item.path if item.get_closest_marker("alone") is not None else None for item in items]
    items[:] = shares(items, alone, workers)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.freeze()  # PyTorch's modules and thousands of tests need no looking through again and again


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Rank processes that live as long as the session (tests/fleet.py)."""
    ranks = Fleet()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def no_lab() -> str | None:
    """Why there can be no emulated hosts here; None if there can."""
    return unavailable()


@pytest.fixture
def lab(no_lab: str | None) -> Iterator[Callable[..., Lab]]:
    """``lab(hosts, rate)`` makes emulated hosts that end with the test; skips where there can be none."""
    if no_lab is not None:
        pytest.skip(no_lab)
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Lab(*args, **options))


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``call("train", "--steps", "3")``: exit code, stdout and stderr of ``commlib train --steps 3`` in this process.

    Its ranks have their own.
    """

    def calling(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(args)
        out, err = capfd.readouterr()
        return int(exit_.value.code or 0), out, err

    return calling


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a child process, a non-daemon thread or a listening socket behind."""
    looks: dict[str, Callable[[], dict[object, str]]] = {
        "child processes": children,
        "non-daemon threads": threads,
        "listening sockets": listeners,
    }
    before = {what: set(look()) for what, look in looks.items()}
    yield
    end = time.monotonic() + _PATIENCE
    while True:
        left = {what: [v for k, v in look().items() if k not in before[what]] for what, look in looks.items()}
        if not any(left.values()):
            return
        if time.monotonic() > end:
            pytest.fail("left behind: " + "; ".join(f"{k}: {', '.join(v)}" for k, v in left.items() if v))
        gc.collect()  # a process group closes its sockets when it is collected
        time.sleep(0.02)


def children() -> dict[object, str]:
    """Process id → command line of every child that is not one of Python's own helpers; zombies count."""
    found: dict[object, str] = {}
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            pids = task.read_text().split()
        except OSError:
            continue  # the thread has ended
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # the child has ended
            if pid not in PIDS and not any(h in command for h in _HELPERS):
                found[pid] = f"{pid} ({command.strip() or 'zombie'})"
    return found


def threads() -> dict[object, str]:
    """Every live non-daemon thread by identity."""
    return {t: t.name for t in threading.enumerate() if not t.daemon}


def listeners() -> dict[object, str]:
    """Inode → address of every socket that this process has open and that listens."""
    found: dict[object, str] = {}
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # closed meanwhile, as the descriptor of this very listing is
            if (name := os.readlink(path)).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as s:
                    if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[name] = _address(s)
    return found


def _address(s: socket.socket) -> str:
    address = s.getsockname()
    return f"unix {address or 'unnamed'}" if s.family == socket.AF_UNIX else f"tcp port {address[1]}"
