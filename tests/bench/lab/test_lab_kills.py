"""However a lab ends, nothing of it is left: fifty starts, each killed somewhere, counted afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import warm
from commlib.bench.lab import Lab
from commlib.bench.lab.run import run_command
from commlib.bench.lab.schedule import Event
from commlib.bench.launch import Terminated, sigterm_raises

_MARK = "COMMLIB_LAB_TEST"
_GONE_S = 10.0  # the kernel frees a network namespace a little after its last process


def own_a_lab(mark: str) -> None:
    """What an owner does: make a lab, run something on every host, and wait for it."""
    os.environ[_MARK] = mark
    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    with sigterm_raises(), contextlib.suppress(KeyboardInterrupt), Lab(3, 50e6, ranks_per_host=2) as lab:
        run_command(lab, ["sh", "-c", "sleep 60 & sleep 60"])


def left(mark: str) -> dict[str, list[str]]:
    """What a lab could leave: links and qdiscs of the machine, named namespaces, and processes with their own."""
    marked = f"{_MARK}={mark}".encode()
    ours = os.stat("/proc/self/ns/net").st_ino
    processes, namespaces = [], set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marked in (entry / "environ").read_bytes().split(b"\0"):
                processes.append(entry.name)
            inode = os.stat(entry / "ns/net").st_ino
            if inode != ours:
                namespaces.add(str(inode))
    return {
        "links": sorted(os.listdir("/sys/class/net")),
        "qdiscs": sorted(_lines("tc", "qdisc", "show")),
        "named namespaces": sorted(_lines("ip", "netns", "list")),
        "network namespaces": sorted(namespaces),
        "processes": processes,
    }


def _lines(*argv: str) -> list[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()


def relatives(mark: str) -> list[int]:
    """The owner's processes in the order they were started."""
    return sorted(int(p) for p in left(mark)["processes"])


@pytest.mark.full
def test_fifty_starts_and_random_kills_leave_nothing(no_lab: str | None) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    draw = random.Random(3)
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    before = left(mark)
    context = warm.context()
    killed: dict[str, int] = {}
    for _ in range(50):
        owner = context.Process(target=own_a_lab, args=(mark,))
        owner.start()
        time.sleep(draw.uniform(0.0, 0.4))  # anywhere between the first line and the last rank's start
        victims = relatives(mark)
        who = draw.choice(["owner", "owner", "member"])
        how = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]) if who == "owner" else signal.SIGKILL
        victim = owner.pid if who == "owner" or not victims else draw.choice(victims)
        assert victim is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, how)
        if victim != owner.pid:  # keeper, a rank, or what a rank started: the owner may go on; end it too
            time.sleep(draw.uniform(0.0, 0.1))
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner.pid or 0, signal.SIGKILL)
        owner.join(20)
        assert owner.exitcode is not None
        owner.close()
        killed[f"{who} by {how.name}"] = killed.get(f"{who} by {how.name}", 0) + 1
    until = time.monotonic() + _GONE_S
    while (after := left(mark)) != before and time.monotonic() < until:
        time.sleep(0.05)
    assert after == before
    assert sum(killed.values()) == 50
    assert len(killed) == 4, killed


class _SlowLab(Lab):
    """A rank needs half a second to come into its host: what a loaded machine can do."""

    def prefix(self, rank: int) -> list[str]:
        return ["sh", "-c", 'sleep 0.5; exec "$@"', "sh", *super().prefix(rank)]


@pytest.mark.full
@pytest.mark.parametrize("told", [KeyboardInterrupt, Terminated])
def test_a_rank_on_its_way_into_its_host_ends_with_the_others(no_lab: str | None, told: type[BaseException]) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)

    def stop(event: Event) -> None:
        raise told

    with _SlowLab(2, ranks_per_host=2) as lab:
        began = time.monotonic()
        with pytest.raises(told):
            run_command(lab, ["sleep", "60"], [Event(0.0, "heal", 0)], on_event=stop)
        assert time.monotonic() - began < 20.0


def test_the_count_sees_what_it_is_there_to_see(no_lab: str | None) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    before = left(mark)
    with Lab(2) as lab:
        child = subprocess.Popen(
            [*lab.enter(0), sys.executable, "-c", "print('up', flush=True); import time; time.sleep(60)"],
            stdout=subprocess.PIPE, env={**os.environ, _MARK: mark},
        )  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        during = left(mark)
        assert during["processes"] != before["processes"]
        assert len(set(during["network namespaces"]) - set(before["network namespaces"])) >= 2
    child.communicate(timeout=20)
    assert left(mark)["processes"] == []
