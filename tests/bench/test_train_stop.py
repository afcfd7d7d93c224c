"""However the command is stopped, no rank outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
_DEADLINE = 40.0


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A long run in a session of its own, well under way."""
    text = tmp_path / "text"
    text.write_text("all work and no play " * 100)
    command = [sys.executable, "-m", "commlib.bench.train", "--task", "text", "--data", str(text), "--hidden", "64"]
    command += ["--batch", "4", "--steps", "1000000", "--comm", "onebit"]
    command += ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "20"]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=env
    ) as process:
        try:
            _until(lambda: any(tmp_path.glob("kept/*/*/latest")) or process.poll() is not None)
            assert process.poll() is None, process.communicate()
            assert len(session(process.pid)) == 3  # the command and two ranks
            yield process
        finally:
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("signum", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "told to stop (SIGTERM)")],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_all_ranks(training: subprocess.Popen[str], signum: int, code: int, said: str) -> None:
    if signum == signal.SIGINT:
        os.killpg(training.pid, signum)  # as the terminal does: the ranks get it too
    else:
        training.send_signal(signum)
    out, err = training.communicate(timeout=_DEADLINE)
    assert (out, err) == ("", f"{said}: all ranks were ended; go on with --resume\n")
    assert training.returncode == code
    _until(lambda: not session(training.pid))


def test_ranks_end_when_their_parent_is_killed(training: subprocess.Popen[str]) -> None:
    training.kill()
    training.wait(_DEADLINE)
    _until(lambda: not session(training.pid))


def session(sid: int) -> list[int]:
    """Live processes of a session, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == sid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _DEADLINE
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)
