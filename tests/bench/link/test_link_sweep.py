"""Sizes, repetitions and what is left out: pure functions of the times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.link import sweep
from commlib.bench.link.sweep import ladder, parse_size, show_size, whole

TIMES = st.lists(st.floats(1e-6, 10), min_size=1, max_size=10)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64kB", 64_000), ("1 MB", 10**6), ("256mb", 256 * 10**6), ("1.5k", 1500), ("4", 4), ("1GB", 10**9)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1kB", "0", "3B", "5GB", "64kbit", "1e3"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="message size is a number") as e:
        parse_size(text)
    assert repr(text) in str(e.value)


def test_the_ladder_has_its_ends_and_rungs_between() -> None:
    assert ladder(1000, 256 * 10**6) == [n * unit for unit in (1000, 10**6) for n in (1, 4, 16, 64, 256)]
    assert ladder(2000, 20_000) == [2000, 4000, 16_000, 20_000]
    assert ladder(5000, 5000) == [5000]
    with pytest.raises(ValueError, match="--min 4 MB is larger than --max 64 kB"):
        ladder(4_000_000, 64_000)


@given(st.integers(1, 64), st.sampled_from(ladder(1000, 256 * 10**6)))
def test_a_size_is_rounded_up_to_whole_parts(ranks: int, size: int) -> None:
    rounded = whole(size, ranks)
    assert rounded % (4 * ranks) == 0
    assert 0 <= rounded - size < 4 * ranks


def test_rounded_sizes_read_as_what_was_asked() -> None:
    assert [show_size(whole(n, 4)) for n in (1000, 4000, 64_000, 1_000_000)] == ["1 kB", "4 kB", "64 kB", "1 MB"]
    assert [show_size(n) for n in (0, 999, 1500, 256 * 10**6, 4 * 10**9)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "256 MB",
        "4 GB",
    ]


@given(TIMES, st.floats(-1, 100))
def test_every_size_is_repeated_three_to_fifty_times(times: list[float], left: float) -> None:
    rounds = sweep.repetitions(times, left)
    for i in range(len(times)):
        assert sweep.LEAST <= sum(counts[i] for counts in rounds) <= sweep.MOST
    spent = sum(c * t for counts in rounds for c, t in zip(counts, times, strict=True))
    assert spent <= left * (1 + 1e-9) or len(rounds) == sweep.LEAST


@given(TIMES)
def test_with_time_enough_all_are_done_fifty_times(times: list[float]) -> None:
    rounds = sweep.repetitions(times, 1e6)
    assert [sum(counts[i] for counts in rounds) for i in range(len(times))] == [sweep.MOST] * len(times)


def test_short_messages_are_repeated_within_a_round() -> None:
    rounds = sweep.repetitions([0.001, 0.01, 1.0], 4.0)
    assert rounds == [[16, 16, 1]] * 3


@given(TIMES)
def test_the_share_needed_lets_every_size_in(times: list[float]) -> None:
    times = sorted(times)
    left = sweep.share_needed(times) * (1 + 1e-9)
    for i, each in enumerate(times):
        assert i == 0 or sweep.affordable(each, times[:i], left)
        left -= sweep.UNTIMED * each


def test_a_size_that_takes_too_long_is_not_begun() -> None:
    assert sweep.affordable(1.0, [0.25], 5.75)
    assert not sweep.affordable(1.0, [0.25], 5.7)


@given(st.floats(1e-5, 1e-2), st.floats(1e-10, 1e-7), st.integers(1, 9))
def test_a_larger_size_is_expected_at_no_less_than_its_line(alpha: float, beta: float, many: int) -> None:
    sizes = [1000 * 4**k for k in range(many)]
    known = [(n, alpha + beta * n) for n in sizes]
    larger = 4 * sizes[-1]
    assert sweep.expected(larger, known, 2 * beta) >= (alpha + beta * larger) * (1 - 1e-9)
    assert sweep.expected(larger, known, 2 * beta) <= 4 * known[-1][1] * (1 + 1e-9)


def test_a_small_message_that_had_to_wait_does_not_rule_large_ones_out() -> None:
    late = sweep.expected(4000, [(1000, 0.3)], 1e-8)
    assert late == pytest.approx(0.3 + 3e-4)
    assert sweep.expected(4000, [(1000, 0.3)], float("inf")) == pytest.approx(1.2)


def test_only_what_is_quick_is_probed_again() -> None:
    assert sweep.probe_again(0.001, 1.0) == 2
    assert sweep.probe_again(0.1, 1.0) == 0


def test_no_operation_is_left_without_time() -> None:
    assert sweep.share(6.0, 3, 1.0) == 2.0
    assert sweep.share(-5.0, 2, 1.0) == 0.25
