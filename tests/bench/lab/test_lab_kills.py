"""However a lab ends, nothing of it is left: fifty starts, each killed somewhere, counted afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from commlib.bench.lab import Lab
from commlib.bench.lab.events import Event
from commlib.bench.lab.run import run_command
from commlib.bench.launch.processes import Terminated, sigterm_raises
from tests.support import forked_ranks

_MARK = "COMMLIB_LAB_TEST"
_DEADLINE_S = 120.0  # against hanging


def own_a_lab(mark: str) -> None:
    """What an owner does: make a lab, run something on every host, and wait for it."""
    os.environ[_MARK] = mark
    os.setsid()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    with sigterm_raises(), contextlib.suppress(KeyboardInterrupt), Lab(3, 50e6, ranks_per_host=2) as lab:
        run_command(lab, ["sh", "-c", "sleep 600 & sleep 600"])


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


def stays(mark: str, before: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """What is there that was not there before, and does not go: the kernel frees a network namespace a little after its
    last process, and labs of others come and go meanwhile."""
    until = time.monotonic() + _DEADLINE_S
    found = {what: set(each) - set(before[what]) for what, each in left(mark).items()}
    while (found := {what: each for what, each in found.items() if each}) and time.monotonic() < until:
        time.sleep(0.05)
        now = left(mark)
        found = {what: each & set(now[what]) for what, each in found.items()}
    return found


def _lines(*argv: str) -> list[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=_DEADLINE_S).stdout.splitlines()


def relatives(mark: str) -> list[int]:
    """The owner's processes in the order they were started."""
    return sorted(int(p) for p in left(mark)["processes"])


@dataclasses.dataclass(frozen=True)
class Kill:
    """Who is killed and how: after so long, the one at this share of the list; and after so long more, the owner."""

    who: str
    how: signal.Signals
    after_s: float
    which: float
    then_s: float


def kills(count: int) -> Iterator[Kill]:
    """The same ones on every machine."""
    draw = random.Random(3)
    for _ in range(count):
        who = draw.choice(["owner", "owner", "member"])
        how = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]) if who == "owner" else signal.SIGKILL
        yield Kill(who, how, draw.uniform(0.0, 0.4), draw.random(), draw.uniform(0.0, 0.1))


@pytest.mark.full
def test_fifty_starts_and_random_kills_leave_nothing(no_lab: str | None) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    before = left(mark)
    context = forked_ranks.context()
    killed: dict[str, int] = {}
    for each in kills(50):
        owner = context.Process(target=own_a_lab, args=(mark,))
        owner.start()
        time.sleep(each.after_s)  # anywhere between the first line and the last rank's start
        victims = relatives(mark)
        victim = owner.pid if each.who == "owner" or not victims else victims[int(each.which * len(victims))]
        assert victim is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, each.how)
        if victim != owner.pid:  # keeper, a rank, or what a rank started: the owner may go on; end it too
            time.sleep(each.then_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner.pid or 0, signal.SIGKILL)
        owner.join(_DEADLINE_S)
        assert owner.exitcode is not None
        owner.close()
        killed[f"{each.who} by {each.how.name}"] = killed.get(f"{each.who} by {each.how.name}", 0) + 1
    assert stays(mark, before) == {}
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

    with _SlowLab(2, ranks_per_host=2) as lab, pytest.raises(told):
        # By themselves they end later than pytest waits.
        run_command(lab, ["sleep", "600"], [Event(0.0, "heal", 0)], on_event=stop)


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
    child.communicate(timeout=_DEADLINE_S)
    assert left(mark)["processes"] == []
