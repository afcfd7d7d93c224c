"""How many local steps: the published figures, and the bound that is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.local_sgd.sync_schedule import meeting_share, naive_speedup, speedup, steps_for


def test_the_papers_setting_gives_the_papers_tau() -> None:
    assert steps_for(2.0, 20.0, 1 / 6) == 50
    assert meeting_share(2.0, 20.0, 50) == pytest.approx(1 / 6)


@given(st.floats(1e-4, 100), st.floats(0, 1000), st.floats(0.001, 0.999))
def test_the_share_is_kept_and_a_step_fewer_would_not_keep_it(step_s: float, meeting_s: float, share: float) -> None:
    tau = steps_for(step_s, meeting_s, share)
    assert meeting_share(step_s, meeting_s, tau) <= share * (1 + 1e-9)
    assert tau == 1 or meeting_share(step_s, meeting_s, tau - 1) > share * (1 - 1e-9)


def test_what_it_gains_is_the_papers_figure_of_alexnet() -> None:
    # 55.6 hours alone; 22.9, 14.5 and 12.8 with 3, 5 and 10 ranks (the paper prints 4.4 for the last)
    for hours, times in ((22.9, 2.43), (14.5, 3.83), (12.8, 4.34)):
        meetings = hours * 3600 / (50 * 2.0 + 20.0)
        assert speedup(2.0, 20.0, 50, 55.6 * 3600 / 2.0, meetings) == pytest.approx(times, abs=0.005)


def test_parallel_sgd_cannot_be_faster_than_its_meetings_and_is_as_many_times_as_ranks_without() -> None:
    assert naive_speedup(2.0, 0.0, 8) == 8
    assert naive_speedup(2.0, 20.0, 10**9) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: steps_for(0.0, 1.0, 0.5), "more than 0 seconds"),
        (lambda: steps_for(1.0, -1.0, 0.5), "0 seconds or more"),
        (lambda: steps_for(1.0, 1.0, 1.0), r"in \(0, 1\)"),
        (lambda: steps_for(1.0, float("nan"), 0.1), "0 seconds or more"),
        (lambda: meeting_share(1.0, 1.0, 0), "1 or more"),
        (lambda: naive_speedup(1.0, 1.0, 0), "1 or more"),
        (lambda: speedup(1.0, 1.0, 5, 0, 1), "above 0"),
    ],
)
def test_bad_numbers_are_refused(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()  # type: ignore[operator]
