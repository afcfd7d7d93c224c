"""How long a member may be silent: longer if it is irregular, never for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.server.membership.failure_detector import FailureDetector


def beaten(intervals: list[float], patience: float = 2.0) -> tuple[FailureDetector, float]:
    now, pulse = 0.0, FailureDetector(0.0, patience)
    for i, interval in enumerate(intervals):
        now += interval
        pulse.hear(now, str(i))
    return pulse, now


def test_a_regular_member_is_given_up_soon_after_its_patience() -> None:
    pulse, now = beaten([0.25] * 100)
    assert not pulse.late(now + 3.0)
    assert pulse.late(now + 3.1)


def test_one_that_was_late_now_and_then_is_given_more_time() -> None:
    regular, _ = beaten([0.25] * 100)
    slow, now = beaten([0.25, 0.25, 0.25, 1.5] * 25)
    assert slow.deadline > regular.deadline + 3.0
    assert slow.late(now + 20.0)


def test_the_same_word_again_is_no_sign_of_life() -> None:
    pulse = FailureDetector(0.0, 2.0)
    for now in range(10):
        pulse.hear(float(now), "7")
    assert pulse.silent(9.0) == 9.0
    assert pulse.late(9.0)


def test_what_a_listener_missed_while_it_was_away_is_not_held_against_anybody() -> None:
    pulse, now = beaten([0.25] * 10)
    pulse.excuse(60.0)
    assert not pulse.late(now + 61.0)


@given(st.floats(0.5, 60.0), st.floats(0.1, 0.5))
def test_one_that_is_dead_is_given_up_however_long_its_listener_was_away_before_each_look(
    apart: float, counted: float
) -> None:
    pulse, now = beaten([0.25] * 10)
    looks = 0
    while not pulse.late(now):
        now += apart
        pulse.excuse(min(apart - counted, pulse.silent(now)))
        pulse.hear(now, "9")
        looks += 1
    assert looks * counted <= 10 * pulse.deadline


@given(st.lists(st.floats(0.001, 30.0), min_size=2, max_size=50), st.floats(0.1, 20.0))
def test_a_deadline_is_never_below_the_patience_and_never_beyond_what_was_seen(intervals: list[float], patience: float):
    pulse, now = beaten(intervals, patience)
    assert patience <= pulse.deadline <= patience + 20 * max(intervals)
    assert pulse.late(now + pulse.deadline + 0.01)


@pytest.mark.parametrize("patience", [0.5, 10.0])
def test_one_that_was_never_heard_of_has_its_patience(patience: float) -> None:
    pulse = FailureDetector(5.0, patience)
    assert not pulse.late(5.0 + patience)
    assert pulse.late(5.1 + patience)
