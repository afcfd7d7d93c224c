"""A limit as it is given, and the token bucket that keeps it, on a clock of numbers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.exchange.rate_limit import RateLimit, TokenBucket

RATES = st.floats(1.0, 1e9)
DEPTHS = st.floats(1.0, 1e6)
PAUSES = st.one_of(st.just(0.0), st.floats(0.0, 1e3))


def grants(rate: float, depth: float, requests: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(when, bytes) of what was granted, each request made so long after the one before."""
    pacer, now, found = TokenBucket(rate, depth), 0.0, []
    for pause, nbytes in requests:
        now += pause
        wait = pacer.take(now, nbytes)
        assert wait >= 0
        found.append((now + wait, nbytes))
    return found


@given(RATES, DEPTHS, st.lists(st.tuples(PAUSES, st.floats(0, 3e6)), min_size=1, max_size=30))
def test_in_any_window_no_more_is_granted_than_rate_times_window_and_one_burst(rate, depth, requests) -> None:
    schedule = sorted(grants(rate, depth, requests))
    burst = max(depth, *(n for _, n in schedule))
    for i, j in itertools.combinations_with_replacement(range(len(schedule)), 2):
        window = schedule[j][0] - schedule[i][0]
        granted = sum(n for _, n in schedule[i : j + 1])
        # times around 1e4 s are exact to 2e-12 s
        assert granted <= rate * (window + 1e-8) + burst + 1e-6 * (granted + burst)


@given(RATES, DEPTHS, st.lists(st.tuples(PAUSES, st.floats(0, 3e6)), min_size=2, max_size=30))
def test_who_asks_first_goes_first(rate, depth, requests) -> None:
    times = [when for when, _ in grants(rate, depth, requests)]
    assert all(b >= a - 1e-8 for a, b in itertools.pairwise(times))


@given(RATES, DEPTHS, st.integers(1, 40))
def test_who_keeps_asking_gets_the_whole_rate(rate: float, depth: float, count: int) -> None:
    requests = [(0.0, depth / 2)] * count
    last, _ = grants(rate, depth, requests)[-1]
    assert last == pytest.approx(max(0.0, (count - 2) * depth / 2 / rate), rel=1e-6, abs=1e-9)


def test_a_pause_fills_the_bucket_and_no_more() -> None:
    pacer = TokenBucket(100.0, 50.0)
    assert pacer.take(0.0, 50) == 0.0
    assert pacer.take(0.0, 50) == pytest.approx(0.5)
    assert pacer.take(1000.0, 50) == 0.0
    assert pacer.take(1000.0, 10) == pytest.approx(0.1)


def test_what_is_larger_than_the_bucket_waits_until_it_is_full_and_leaves_a_debt() -> None:
    pacer = TokenBucket(100.0, 50.0)
    assert pacer.take(0.0, 10) == 0.0
    assert pacer.take(0.0, 200) == pytest.approx(0.1)
    assert pacer.take(0.1, 10) == pytest.approx(1.6)  # 200 − 50 + 10 bytes at 100 a second


@pytest.mark.parametrize(
    ("given", "mbit"), [("50mbit", 50.0), (" 1 Gbit/s ", 1000.0), ("64kbit", 0.064), (RateLimit(7), 7.0)]
)
def test_a_limit_is_a_rate_or_a_rate_limit(given: Any, mbit: float) -> None:
    limit = RateLimit.of(given)
    assert limit is not None
    assert limit.mbit == mbit
    assert limit.bytes_s == pytest.approx(mbit * 125_000)
    assert limit.seconds(limit.bytes_s) == pytest.approx(1.0)


def test_no_limit_is_none() -> None:
    assert RateLimit.of(None) is None


@pytest.mark.parametrize(("mbit", "burst"), [(50, 312_500), (1, 65_536), (1000, 6_250_000)])
def test_the_usual_burst_takes_50_ms_and_is_64_kib_at_least(mbit: float, burst: int) -> None:
    assert RateLimit(mbit).at_once == burst


@pytest.mark.parametrize("mbit", [0, -1, math.nan, math.inf, "50", None, True])
def test_what_is_no_positive_rate_is_refused(mbit: Any) -> None:
    with pytest.raises(ValueError, match=r"limit: mbit must be a number of Mbit/s > 0") as caught:
        RateLimit(mbit)
    assert repr(mbit) in str(caught.value)


@pytest.mark.parametrize("burst", [0, 1, 4095, -1, math.nan, 1e6, True, False, "1mb"])
def test_a_burst_below_4_kib_is_refused(burst: Any) -> None:
    with pytest.raises(ValueError, match=r"limit: burst must be a whole number of bytes ≥ 4096") as caught:
        RateLimit(50, burst)
    assert repr(burst) in str(caught.value)


@pytest.mark.parametrize("text", ["", "fast", "50", "0mbit", "-5mbit", "nan"])
def test_a_text_that_is_no_rate_is_refused_as_a_limit(text: str) -> None:
    with pytest.raises(ValueError, match=r"limit: a rate") as caught:
        RateLimit.of(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("given", [50, 5e7, b"50mbit", ["50mbit"]])
def test_what_is_no_limit_at_all_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r'limit is a rate as "50mbit" or a RateLimit\(mbit=50\)'):
        RateLimit.of(given)
