"""The overlap of the backward pass and the wire, against its recursion and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.planning.cost.overlap import first_first_seconds, just_in_time_seconds, overlap, step_seconds

TIMES = st.lists(st.tuples(*[st.floats(0, 10) for _ in range(3)]), min_size=1, max_size=8)


def test_the_golden_step_takes_ten_and_not_twelve() -> None:
    backward, wire = (1, 1, 1), (1, 1, 4)
    assert step_seconds(3, backward, wire) == 10
    assert overlap(backward, wire).exposed == 4


@given(TIMES)
def test_a_step_is_never_shorter_than_its_bounds_nor_longer_than_without_overlap(
    times: list[tuple[float, ...]],
) -> None:
    _, b, c = zip(*times, strict=True)
    end = overlap(b, c).seconds
    assert max(sum(b) + c[0], b[-1] + sum(c)) <= end + 1e-9
    assert end <= sum(b) + sum(c) + 1e-9


@given(TIMES)
def test_the_link_carries_one_layer_at_a_time_and_none_before_it_is_ready(times: list[tuple[float, ...]]) -> None:
    _, b, c = zip(*times, strict=True)
    line = overlap(b, c)
    assert all(begin >= ready for begin, ready in zip(line.begin, line.ready, strict=True))
    assert all(line.begin[i] >= line.end[i + 1] for i in range(len(b) - 1))


@given(TIMES)
def test_waiting_layer_by_layer_is_never_slower(times: list[tuple[float, ...]]) -> None:
    f, b, c = zip(*times, strict=True)
    assert just_in_time_seconds(f, b, c) <= overlap(b, c).seconds + sum(f) + 1e-9
    assert just_in_time_seconds(f, b, c) >= max(sum(b) + sum(f), overlap(b, c).end[0] + f[0]) - 1e-9


def test_no_layers_take_no_time() -> None:
    assert overlap((), ()).seconds == 0
    assert step_seconds(1.0, (), ()) == 1.0


@pytest.mark.parametrize(("backward", "wire"), [((1, 2), (1,)), ((1, -1), (1, 1))])
def test_times_that_cannot_be_are_refused(backward: tuple[float, ...], wire: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"one time for every layer|negative"):
        overlap(backward, wire)


@given(st.lists(st.tuples(*[st.floats(0.0, 3.0)] * 3), min_size=1, max_size=8))
def test_what_is_needed_first_sent_first_is_never_slower_and_nothing_is_faster_than_the_line(
    times: list[tuple[float, float, float]],
) -> None:
    forward, backward, wire = (list(t) for t in zip(*times, strict=True))
    first = first_first_seconds(forward, backward, wire)
    assert first <= just_in_time_seconds(forward, backward, wire) + 1e-9
    assert first >= max(sum(forward) + sum(backward), sum(wire)) - 1e-9


def test_first_things_first_pays_where_the_link_is_the_bottleneck() -> None:
    # Ready at 1 and 2, each 4 on the link. In turn: layer 1 ends at 5, layer 0 at 9, and the next pass at 9 + 2.
    # By urgency: layer 0 overtakes at 2 and ends at 6, layer 1 at 9: 6 + 1, then it waits for 9, + 1.
    assert just_in_time_seconds([1, 1], [1, 1], [4, 4]) == 11
    assert first_first_seconds([1, 1], [1, 1], [4, 4]) == 10
