"""Who measures the machine is alone; the others run side by side, and do not keep that one waiting for ever."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import exclusive_lock

# Says when it waits and when it is in; leaves when it is told.
GUEST = """
import sys
sys.path.insert(0, sys.argv[1])
import exclusive_lock
exclusive_lock._ROOM = exclusive_lock.Path(sys.argv[2])
exclusive_lock._TURNSTILE = exclusive_lock._ROOM.parent
print("waits", flush=True)
with exclusive_lock.turn(alone=sys.argv[3] == "alone"):
    print("in", flush=True)
    sys.stdin.readline()
"""


class Guest:
    def __init__(self, room: Path, how: str) -> None:
        command = [sys.executable, "-c", GUEST, str(Path(exclusive_lock.__file__).parent), str(room), how]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self.process.stdout is not None
        self.out = self.process.stdout  # unbuffered: what has come and was not read can be seen
        assert self.says() == "waits"

    def says(self) -> str:
        return self.out.readline().decode().strip()

    def waits(self) -> bool:
        """Whether it is still not in, after some time."""
        return not select.select([self.out], [], [], 0.3)[0]

    def leave(self) -> None:
        self.process.communicate(b"\n", timeout=120)


@pytest.fixture
def room(tmp_path: Path) -> Path:
    path = tmp_path / "room"
    path.touch()
    return path


def test_a_test_that_is_alone_waits_for_the_others_and_they_for_it(room: Path) -> None:
    first, second = Guest(room, "any"), Guest(room, "any")
    assert first.says() == second.says() == "in"
    alone = Guest(room, "alone")
    assert alone.waits()
    late = Guest(room, "any")
    assert late.waits()  # behind the one that is alone, or that would never come in
    first.leave()
    assert alone.waits()
    second.leave()
    assert alone.says() == "in"
    assert late.waits()
    alone.leave()
    assert late.says() == "in"
    late.leave()


def test_one_that_dies_leaves_no_lock_behind(room: Path) -> None:
    dead = Guest(room, "alone")
    assert dead.says() == "in"
    dead.process.kill()
    dead.process.communicate()
    other = Guest(room, "alone")
    assert other.says() == "in"
    other.leave()


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60), st.integers(1, 4))
def test_the_first_share_begins_with_all_that_are_alone_and_in_every_share_long_ones_come_early(
    tests: list[tuple[bool, bool]], workers: int
) -> None:
    alone, long = [a for a, _ in tests], [is_long for _, is_long in tests]
    order = exclusive_lock.shares(list(range(len(tests))), alone, long, workers)
    assert sorted(order) == list(range(len(tests)))
    assert [alone[t] for t in order] == sorted(alone, reverse=True)  # modules stay together, too
    rest = order
    for i in range(workers):  # as xdist hands them out
        share, rest = rest[: len(rest) // (workers - i)], rest[len(rest) // (workers - i) :]
        first = [0 if alone[t] else 1 if long[t] else 2 for t in share]
        if first.count(2) < 2:  # there are not enough others: they may reach into the next share
            break
        assert first == ([] if i == 0 else [2]) + sorted(first[0 if i == 0 else 1 :])
