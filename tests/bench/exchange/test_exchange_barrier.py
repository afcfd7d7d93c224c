"""Ranks stand still together, and move on together."""

from __future__ import annotations

import itertools
from pathlib import Path

from commlib.bench.exchange.barrier import Arrived, Gate, stand_still
from commlib.bench.launch.child import tell
from commlib.bench.launch.processes import run_ranks


def three_times(gate: str) -> None:
    """Stands still three times and says when it went on."""
    for i in range(3):
        stand_still(Path(gate))
        tell(i)


def test_nobody_goes_on_before_all_have_come_and_the_reading_is_taken() -> None:
    went_on: list[int] = []
    arrived = 0
    with Gate(3, lambda: len(went_on)) as gate:

        def follow(rank: int, message: object) -> None:
            nonlocal arrived
            if isinstance(message, Arrived):
                arrived += 1
                gate.arrive()
            else:
                assert isinstance(message, int)
                went_on.append(message)
                assert arrived >= 3 * (message + 1)

        run_ranks(three_times, 3, (str(gate.path),), on_message=follow, timeout=300)
        assert gate.readings == [0, 3, 6]  # all who went on the last time, none who did this time
        path = gate.path
    assert not path.exists()


def test_readings_are_repeated_until_two_agree() -> None:
    values = itertools.chain([1, 2, 3, 3], itertools.count(4))
    with Gate(1, lambda: next(values)) as gate:
        gate.arrive()
        assert gate.readings == [3]


def test_what_never_rests_is_taken_in_the_end() -> None:
    values = itertools.count()
    with Gate(1, lambda: next(values)) as gate:
        gate.arrive()
        assert 10 < gate.readings[0] < 1000
