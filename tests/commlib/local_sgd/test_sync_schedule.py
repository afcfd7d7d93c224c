"""When ranks meet: fragments in turn, and τ by what steps and meetings take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.local_sgd.sync_schedule import MeasuredTau, SyncMeasurements, SyncSchedule, meeting_share


def rounds(pace: SyncSchedule, steps: int) -> list[list[int]]:
    return [pace.step() for _ in range(steps)]


def test_a_model_in_one_piece_meets_after_every_tau_steps() -> None:
    assert rounds(SyncSchedule(3, 2), 7) == [[], [], [0], [], [], [0], []]


def test_fragments_meet_at_equal_distances_and_the_last_ends_the_round() -> None:
    assert rounds(SyncSchedule(6, 2, 3), 7) == [[], [0], [], [1], [], [2], []]


@given(st.integers(1, 40), st.data())
def test_every_fragment_meets_once_in_a_round(tau: int, data: st.DataObject) -> None:
    fragments = data.draw(st.integers(1, tau))
    pace = SyncSchedule(tau, 2, fragments)
    for _ in range(3):
        assert sorted(f for due in rounds(pace, tau) for f in due) == list(range(fragments))


@given(st.floats(1e-4, 10), st.floats(0, 100), st.floats(0.01, 0.9))
def test_auto_keeps_its_share_of_time(step_s: float, meeting_s: float, share: float) -> None:
    pace = SyncSchedule(f"auto:share={share},most=1000000", 4)
    pace.met(step_s, meeting_s)
    pace.follow(pace.decide([pace.mine()] * 4))
    assert meeting_share(step_s, meeting_s, pace.tau) <= share * (1 + 1e-6) or pace.tau == 1_000_000


def test_the_slowest_step_counts_and_the_meeting_of_who_came_last() -> None:
    posts = [{"step_s": 1.0, "meeting_s": 9.0}, {"step_s": 3.0, "meeting_s": 2.0}]
    assert SyncMeasurements.of_all(posts) == SyncMeasurements(3.0, 2.0)


def test_a_tau_that_is_nearly_right_stays() -> None:
    pace = SyncSchedule("auto", 2)
    for meeting_s, expected in ((20.0, 100), (22.0, 100), (60.0, 200)):  # medians: 20, 21, 22, 41
        pace.met(1.0, meeting_s)
        pace.follow(pace.decide([pace.mine()] * 2))
        if meeting_s != 60.0:
            assert pace.tau == expected
    pace.met(1.0, 60.0)
    pace.follow(pace.decide([pace.mine()] * 2))
    assert pace.tau > 120


def test_no_round_is_longer_than_the_most() -> None:
    pace = SyncSchedule("auto:most=70", 2)
    pace.met(1e-6, 10.0)
    assert pace.follow(pace.decide([pace.mine()] * 2))
    assert pace.tau == 70


def test_it_says_what_it_gains_by_sparknets_model() -> None:
    pace = SyncSchedule("auto", 5)
    assert "not measured yet" in str(pace)
    pace.met(2.0, 20.0)
    pace.follow(pace.decide([pace.mine()] * 5))
    assert str(pace).startswith("a meeting after every 50 steps: a step takes 2 s and a meeting 20 s, 17 % of all time")
    assert "at most 4.17 times as fast as one, and 0.10 times if" in str(pace)


@pytest.mark.parametrize(
    ("tau", "fragments", "said"),
    [
        (0, 1, "tau is 1 step or more, got 0"),
        ("7", 1, "tau is a number of steps, or auto"),
        ("auto:share=1", 1, r"share must be in \(0, 1\)"),
        ("auto:first=0", 1, "1 ≤ first ≤ most"),
        ("auto:shar=0.2", 1, "did you mean 'share'"),
        (3, 4, "tau=3 steps: 1 to 3 of them"),
        (3, 0, "tau=3 steps: 1 to 3 of them"),
    ],
)
def test_what_makes_no_sense_is_told(tau: Any, fragments: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SyncSchedule(tau, 2, fragments)


def test_a_run_goes_on_where_it_was_in_a_round() -> None:
    pace, other = SyncSchedule(5, 2), SyncSchedule(5, 2)
    rounds(pace, 3)
    other.load_state_dict(pace.state_dict())
    assert rounds(other, 3) == rounds(pace, 3) == [[], [0], []]


def test_the_rule_of_thumb_is_sparknets() -> None:
    assert MeasuredTau().share == pytest.approx(1 / 6)
