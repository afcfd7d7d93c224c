"""Buffers that are in use at the same time never overlap, and there is no less memory than they need."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.server.worker.buffer_planner import ALIGN, BufferUse, meet, peak, plan


def drawn(seed: int, period: int) -> list[BufferUse]:
    rng = random.Random(seed)
    return [
        BufferUse(
            i, rng.randrange(period), rng.randint(1, rng.choice([1, 3, 2 * period])), rng.choice([0, 1, 700, 5000])
        )
        for i in range(rng.randrange(25))
    ]


@given(st.integers(0, 1 << 32), st.integers(1, 20))
def test_two_that_are_ever_in_use_together_share_no_byte(seed: int, period: int) -> None:
    stays = drawn(seed, period)
    rooms = plan(stays, period)
    for a, b in itertools.combinations(stays, 2):
        together = any(a.at(i, period) and b.at(i, period) for i in range(period))
        assert meet(a, b, period) is together
        first, second = rooms.offsets[a.what], rooms.offsets[b.what]
        if together and a.nbytes and b.nbytes:
            assert first + a.nbytes <= second or second + b.nbytes <= first
    assert all(at % ALIGN == 0 for at in rooms.offsets.values())
    assert all(rooms.offsets[s.what] + s.nbytes <= rooms.nbytes for s in stays)
    assert peak(stays, period) <= rooms.nbytes <= sum(-(-s.nbytes // ALIGN) * ALIGN for s in stays)
    assert plan(stays, period) == rooms


@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 1 << 32))
def test_a_window_that_moves_over_equal_buffers_needs_as_many_as_it_is_wide(count: int, width: int, seed: int) -> None:
    """Where the circle closes the window may not fit what is there already: then more, but less than two windows."""
    stays = [BufferUse(i, i, min(width, count), 1000) for i in range(count)]
    rooms = plan(random.Random(seed).sample(stays, count), count)
    least = min(width, count)
    assert least * 1024 <= rooms.nbytes <= min(count, 2 * least) * 1024


@pytest.mark.parametrize(
    ("stays", "message"),
    [
        ([BufferUse("a", 4, 1, 1)], "no stay in a circle of 4"),
        ([BufferUse("a", -1, 1, 1)], "no stay"),
        ([BufferUse("a", 0, 0, 1)], "no stay"),
        ([BufferUse("a", 0, 1, -1)], "no stay"),
        ([BufferUse("a", 0, 1, 1), BufferUse("a", 1, 1, 1)], "two stays have one name"),
    ],
)
def test_what_is_no_stay_is_refused(stays: list[BufferUse], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(stays, 4)


def test_nothing_needs_nothing() -> None:
    assert plan([], 0).nbytes == peak([], 0) == 0
