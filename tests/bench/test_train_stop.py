"""However the command is stopped, no rank outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_DEADLINE = 40.0
_MARK = "COMMLIB_TEST_STOP"  # in the environment of the command and of all it starts


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A long run in a session of its own, well under way."""
    text = tmp_path / "text"
    text.write_text("all work and no play " * 100)
    command = [sys.executable, "-m", "commlib.bench.train", "--task", "text", "--data", str(text), "--hidden", "64"]
    command += ["--batch", "4", "--steps", "1000000", "--comm", "onebit"]
    command += ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "20"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env[_MARK] = str(tmp_path)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=env
    ) as process:
        try:
            _until(lambda: any(tmp_path.glob("kept/*/*/latest")) or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            assert len(alive(tmp_path)) == 3  # the command and two ranks
            yield process
        finally:
            for pid in alive(tmp_path):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize(
    ("signum", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "told to stop (SIGTERM)")],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_all_ranks(
    training: subprocess.Popen[str], tmp_path: Path, signum: int, code: int, said: str
) -> None:
    if signum == signal.SIGINT:
        os.killpg(training.pid, signum)  # as the terminal does; the ranks have sessions of their own
    else:
        training.send_signal(signum)
    out, err = training.communicate(timeout=_DEADLINE)
    assert (out, err) == ("", f"{said}: all ranks were ended; go on with --resume\n")
    assert training.returncode == code
    _until(lambda: not alive(tmp_path))


def test_ranks_end_when_their_parent_is_killed(training: subprocess.Popen[str], tmp_path: Path) -> None:
    training.kill()
    training.wait(_DEADLINE)
    _until(lambda: not alive(tmp_path))


def alive(mark: Path) -> list[int]:
    """Live processes that carry the mark; a zombie has no environment any more."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended
            if wanted in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _DEADLINE
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)
