"""However the command is stopped, no rank outlives it."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from commlib.bench.launch import processes
from commlib.bench.launch.child import BOOTSTRAP
from commlib.cli.main import main
from tests.support import forked_ranks

_DEADLINE_S = 180.0  # against hanging: each of these takes a second or two


@dataclasses.dataclass(frozen=True)
class Training:
    """A command under way.

    Attributes:
        process: the command's; it leads a session, as one that a shell started.
        ranks: process ids of those that it started.
        folder: its output is there.
    """

    process: Any
    ranks: list[int]
    folder: Path

    def ended(self) -> tuple[int, str, str]:
        """Waits for its end; exit code, stdout, stderr."""
        self.process.join(_DEADLINE_S)
        return self.process.exitcode, (self.folder / "out").read_text(), (self.folder / "err").read_text()

    def alive(self) -> list[int]:
        """Those of its processes that are running."""
        return [pid for pid in (self.process.pid, *self.ranks) if _runs(pid)]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """A long run, well under way; its processes are forked, for the start of others is not the subject."""
    text = tmp_path / "text"
    text.write_text("all work and no play " * 100)
    args = ["train", "--task", "text", "--data", str(text), "--hidden", "64", "--batch", "4", "--steps", "1000000"]
    args += ["--comm", "onebit", "--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "5"]
    process = forked_ranks.context().Process(target=become, args=(args, tmp_path))
    process.start()
    found = Training(process, [], tmp_path)
    try:
        _until(lambda: any(tmp_path.glob("kept/*/*/latest")) or process.exitcode is not None)
        assert process.exitcode is None, (tmp_path / "err").read_text()
        found.ranks.extend(_children(process.pid))
        assert len(found.ranks) == 2
        yield found
    finally:
        for pid in found.alive():
            os.kill(pid, signal.SIGKILL)
        process.join()


class Rank(forked_ranks.Rank):
    """A child of the command, as those that it starts are; forked, like the command itself."""

    def __init__(self, link: int, env: Mapping[str, str]) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=be_rank, args=(link, env))
        self._process.start()
        self.pid = self._process.pid


def be_rank(link: int, env: Mapping[str, str]) -> None:
    """Has nothing of the command's open but the link: as long as others hold a socket's end, it is not closed."""
    os.setsid()
    os.closerange(3, link)
    os.closerange(link + 1, 1 << 16)
    os.dup2(2, 1)
    os.environ.update(env)
    sys.argv = ["-c", str(link)]
    exec(BOOTSTRAP, {"__name__": "__main__"})


def become(args: list[str], folder: Path) -> None:
    """``commlib`` with these words, in a session and with output of its own."""
    os.setsid()
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), fd)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ["COMMLIB_KERNELS"] = "reference"  # not a matter of codecs: to compile them takes two seconds
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes.start = lambda prefix, link, env: Rank(link, env)  # type: ignore[assignment,return-value]
    main(args)


@pytest.mark.parametrize(
    ("signum", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "told to stop (SIGTERM)")],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_all_ranks(training: Training, signum: int, code: int, said: str) -> None:
    if signum == signal.SIGINT:
        os.killpg(training.process.pid, signum)  # as the terminal does; the ranks have sessions of their own
    else:
        os.kill(training.process.pid, signum)
    assert training.ended() == (code, "", f"{said}: all ranks were ended; go on with --resume\n")
    _until(lambda: not training.alive())


def test_ranks_end_when_their_parent_is_killed(training: Training) -> None:
    training.process.kill()
    assert training.ended()[0] == -signal.SIGKILL
    _until(lambda: not training.alive())


def _children(pid: int) -> list[int]:
    return [int(p) for task in Path(f"/proc/{pid}/task").glob("*/children") for p in task.read_text().split()]


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)
