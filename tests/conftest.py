"""What holds for every test: nothing it starts outlives it, what it draws is fixed, its tier has a limit."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any

import pytest
import torch
from hypothesis import settings

from commlib.bench.lab import Lab, unavailable
from commlib.bench.launch import processes
from commlib.cli.main import main
from commlib.server.worker import embedded
from tests.support import forked_ranks, tiers
from tests.support import warm_python as warm_python_of_tests
from tests.support.exclusive_lock import shares
from tests.support.leaks import children, listeners, threads
from tests.support.rank_pool import Fleet, nothing
from tests.support.tiers import FAST, LIMIT_S, is_fast, left_out, longest

_PATIENCE = 60.0  # seconds that what a test started may take to go away by itself, on a busy machine

# What hypothesis draws is the same in every run; `make test-all` draws anew (--hypothesis-profile=fresh) and prints how
# to see a failure again. No deadlines: a test that starts processes shares two cores with them, and would measure them.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None, print_blob=True, max_examples=30)
settings.register_profile("fresh", settings.get_profile("fixed"), derandomize=False, max_examples=100)
settings.register_profile("few", settings.get_profile("fixed"), max_examples=5)
settings.load_profile("fixed")

torch.set_num_threads(1)

# A shell that starts the tests in the background has them, and all they start, ignore Ctrl-C; some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_REMOVAL = pytest.StashKey[Any]()


def pytest_configure(config: pytest.Config) -> None:
    """All temporary files of a run, of its workers and of what they start lie in one folder, which ends with it."""
    config.pluginmanager.register(tiers)
    if not hasattr(config, "workerinput"):
        folder = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="commlib-")
        # After multiprocessing has removed its own, at -100.
        removal = Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-1000)
        config.stash[_REMOVAL] = removal


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.TESTS_FAILED and _REMOVAL in session.config.stash:
        session.config.stash[_REMOVAL].cancel()  # somebody may want to look at what they left


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest-timeout's: to wait is not to run
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    with tiers.place_of(item, nextitem):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before -m looks at the marks, and after it has
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if not is_fast(item):
            item.add_marker(pytest.mark.full)
    yield
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    alone = [item.get_closest_marker("alone") is not None for item in items]
    limits = [item.get_closest_marker("timeout") for item in items]
    # one with a limit of its own takes minutes
    items[:] = shares(items, alone, [limit is not None for limit in limits], workers)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Which tests should do less; what was not run, and how it can be."""
    ended = [(r.nodeid, r.user_properties) for of in ("passed", "failed") for r in terminalreporter.stats.get(of, ())]
    if took := longest(ended):
        terminalreporter.write_line(f"took longer than {LIMIT_S:g} s, and should do less, or be full: {took}")
    if skipped := left_out(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(f"skipped: {skipped}")
    if config.option.markexpr == FAST:
        terminalreporter.write_line("this was the fast tier; everything there is: make test-all")


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # PyTorch's modules and thousands of tests need no looking through again and again
    gc.set_threshold(10_000)  # nor what little is left, after each few hundred objects
    if hasattr(session.config, "workerinput"):
        forked_ranks.begin()  # with all tests to run, some will ask for ranks: by then it has imported PyTorch


@pytest.fixture(autouse=True)
def warm_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and shards are forked (tests/support/forked_ranks.py), but where to start them is the subject."""
    if request.node.get_closest_marker("cold") is None:
        monkeypatch.setattr(processes, "start", forked_ranks.start)
        monkeypatch.setattr(embedded, "start", forked_ranks.shard)


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that a test starts are forked from a Python that has imported PyTorch (tests/support/warm_python.py)."""
    monkeypatch.setattr(subprocess, "Popen", warm_python_of_tests.WarmPopen)


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """Rank processes that live as long as the session (tests/support/rank_pool.py)."""
    ranks = Fleet()
    ranks.run(4, nothing)  # what is imported by the first job is no test's time
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
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with pytest.raises(SystemExit) as exit_:
                main(args)
        finally:
            for number, handler in handlers.items():  # a command of its own process needs none put back
                signal.signal(number, handler)
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
