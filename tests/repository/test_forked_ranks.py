"""A forked rank is to its parent, and to itself, what a started one is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commlib.bench.launch.processes import RankFailed, run_ranks
from tests.support import forked_ranks
from tests.support.leaks import children


def says() -> tuple[dict[str, str], int, str, int]:
    """What a rank knows of itself."""
    print("a word")
    print("another", file=sys.stderr)
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    nn.functional.linear(torch.ones(2000, 300), torch.ones(400, 300))  # by as many threads as it may have
    names = ("RANK", "OMP_NUM_THREADS", "MINE", "PYTEST_CURRENT_TEST")
    return {n: os.environ.get(n, "") for n in names}, torch.get_num_threads(), sys.argv[0], os.getsid(0) - os.getpid()


def dies(signum: int) -> None:
    """Without a word."""
    os.kill(os.getpid(), signum)


def hangs() -> None:
    """Until it is ended."""
    threading.Event().wait()


def test_ranks_have_their_environment_threads_session_and_the_parents_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINE", "now")  # later than the server may have started
    found = run_ranks(says, 2, env=lambda rank: {"OMP_NUM_THREADS": str(rank + 1)}, timeout=300)
    for rank, (env, threads, argv, session) in enumerate(found):
        assert env == {"RANK": str(rank), "OMP_NUM_THREADS": str(rank + 1), "MINE": "now", **_test()}
        assert (threads, argv, session) == (rank + 1, "-c", 0)
    out, err = capfd.readouterr()
    assert (out, err.count("a word"), err.count("another")) == ("", 2, 2)


def test_how_it_ended_is_known() -> None:
    with pytest.raises(RankFailed, match="rank 0 was killed by SIGKILL"):
        run_ranks(dies, 1, (int(signal.SIGKILL),), timeout=300)
    with pytest.raises(TimeoutError):
        run_ranks(hangs, 1, timeout=0.2)


def test_one_that_is_left_behind_is_seen() -> None:
    process = forked_ranks.context().Process(target=hangs)
    process.start()
    try:
        assert str(process.pid) in children()
    finally:
        process.kill()
        process.join()
    assert str(process.pid) not in children()


def test_to_wait_for_it_has_an_end() -> None:
    ours, theirs = os.pipe()
    rank = forked_ranks.Rank(
        ours, {"OMP_NUM_THREADS": "1", **os.environ}
    )  # no job comes: it reads, and the pipe stays open
    try:
        assert rank.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.05)
    finally:
        os.close(ours)
        os.close(theirs)
        rank.wait(120)
    assert rank.returncode == 1


def _test() -> dict[str, str]:
    return {"PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"]}


@pytest.mark.full
@pytest.mark.parametrize("last", ["", "os.kill(os.getpid(), 9)"], ids=["ends", "is killed"])
def test_servers_end_with_the_process_that_wanted_them(last: str) -> None:
    names = "[forked_ranks.server(), warm_python._servers[0].pid]"
    code = f"import os\nfrom tests.support import forked_ranks, warm_python\nwarm_python.server()\nprint({names})\n"
    done = subprocess.run([sys.executable, "-u", "-c", code + last], stdout=subprocess.PIPE, text=True, check=False)
    servers = json.loads(done.stdout)
    assert len(servers) == 2
    end = time.monotonic() + 60
    while time.monotonic() < end and any(os.path.exists(f"/proc/{pid}") for pid in servers):
        time.sleep(0.05)
    assert [pid for pid in servers if os.path.exists(f"/proc/{pid}")] == []
