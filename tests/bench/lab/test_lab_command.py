"""``commlib bench lab``: what a user types, and what a slip gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

COMMLIB = [sys.executable, "-m", "commlib", "bench", "lab"]
DEADLINE_S = 300.0  # against hanging

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
said = f"rank {dist.get_rank()} of {dist.get_world_size()}, local {os.environ['LOCAL_RANK']}: {x[0].item()}"
print(said + "\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _needs_a_lab(no_lab: str | None) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)


def lab(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMLIB, *args], capture_output=True, text=True, timeout=DEADLINE_S)


def sh(script: str) -> list[str]:
    return ["--", "sh", "-c", script]


@pytest.mark.full
@pytest.mark.usefixtures("warm_python")
def test_ranks_meet_over_the_switch_as_under_torchrun() -> None:
    done = lab(
        "--hosts", "2", "--ranks-per-host", "2", "--rate", "200mbit", "--json", "--", sys.executable, "-c", ALL_REDUCE
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = sorted(x for x in lines if x.startswith("rank"))
    assert said == [f"rank {r} of 4, local {r % 2}: 10.0" for r in range(4)]
    counters = [json.loads(x) for x in lines if x.startswith("{")]
    assert [c["host"] for c in counters] == ["h0", "h1"]
    assert all(c["sent_bytes"] > 4000 for c in counters)  # 1000 floats crossed the switch
    assert all(c["packets_dropped"] == 0 for c in counters)


@pytest.mark.full
@pytest.mark.usefixtures("warm_python")
def test_torchrun_runs_on_the_hosts(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(ALL_REDUCE)
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --node-rank $GROUP_RANK"
    done = lab("--hosts", "2", *sh(f"{torchrun} --master-addr $MASTER_ADDR --master-port 29400 {script}"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == sorted([*(f"rank {r} of 4, local {r % 2}: 10.0" for r in range(4)), ""])


@pytest.mark.full
def test_the_first_failing_rank_is_named_and_its_status_is_ours() -> None:
    done = lab("--hosts", "3", *sh("test $RANK -ne 1 || exit 7; sleep 600"))
    assert done.returncode == 7
    assert "lab: rank 1 on h1 ended with exit status 7" in done.stderr
    assert "lab: rank 0, 2 was ended because of that" in done.stderr


@pytest.mark.full
def test_a_host_that_dies_is_named() -> None:
    again = [word for at in (0.1, 1, 5, 20, 60) for word in ("--at", f"{at}:kill=1")]  # if it is not there yet
    done = lab("--hosts", "2", *again, *sh("sleep 600"))
    assert done.returncode == 128 + signal.SIGKILL
    assert "lab: rank 1 on h1 was killed by SIGKILL" in done.stderr


@pytest.mark.full
def test_the_schedule_is_followed_and_told(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    args = ["--hosts", "2", "--rate", "1gbit", "--at", "0.2:cut=1", "--at", "0.1:1=50mbit"]
    ranks = sh(f"until test -e {enough}; do sleep 0.1; done")
    with subprocess.Popen([*COMMLIB, *args, *ranks], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(3)][1:]
        enough.touch()
        assert process.wait(DEADLINE_S) == 0
    assert said == ["lab: 0.1 s: h1 at 50mbit\n", "lab: 0.2 s: cut h1\n"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--", "no-such-program"], "command not found: 'no-such-program'"),
        (["--rate", "fast", "--", "true"], "a rate is a number and kbit, mbit or gbit"),
        (["--rate", "1bit", "--", "true"], "a link can have 64kbit to 100gbit"),
        (["--hosts", "0", "--", "true"], "a lab has 1 to 64 hosts"),
        (["--ranks-per-host", "0", "--", "true"], "ranks_per_host must be at least 1"),
        (["--at", "1:cut=9", "--", "true"], "there is no host '9'"),
    ],
)
def test_a_slip_is_explained_in_one_line(call: Callable[..., tuple[int, str, str]], args: list[str], said: str) -> None:
    code, _, err = call("bench", "lab", *args)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_reaches_the_ranks_and_ends_all(signum: int, code: int, tmp_path: Path) -> None:
    farewell = tmp_path / "farewell"
    script = f"trap 'echo bye > {farewell}-$RANK; exit' INT; echo up; while :; do sleep 0.1; done"
    process = subprocess.Popen(
        [*COMMLIB, "--hosts", "2", *sh(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.send_signal(signum)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code
    assert "every process on the hosts was ended" in err
    if signum == signal.SIGINT:
        assert sorted(p.name for p in tmp_path.iterdir()) == ["farewell-0", "farewell-1"]


@pytest.mark.full
@pytest.mark.parametrize(
    "user", [["unshare", "--user", "--map-user=1000", "--map-group=1000"], ["unshare", "--user"]], ids=["1000", "none"]
)
def test_without_root_it_works_where_users_may_make_namespaces_and_else_says_so(user: list[str]) -> None:
    # In a user namespace root keeps its files and loses its rights. Without a user id there it may make no other.
    argv = [*(user if os.geteuid() == 0 else []), *COMMLIB, "--hosts", "2", "--rate", "50mbit", *sh("echo $RANK")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode == 0:
        assert sorted(done.stdout.split()) == ["0", "1"]
    else:
        assert "run it as root, or allow unprivileged user namespaces" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_the_commands_own_options_are_left_alone() -> None:
    done = lab("--hosts", "1", "echo", "--hosts", "9")
    assert done.stdout.splitlines() == ["--hosts 9"]
