"""Rates as text, and the token bucket that makes one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.lab.network_commands import HIGHEST, LOWEST, parse_rate, segment, show_rate, token_bucket


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200mbit", 2e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("64kbit", 64e3), ("100000bit", 1e5), (" 50 Mbit/s ", 5e7)],
)
def test_a_rate_is_read_as_tc_writes_it(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "200", "200mb", "200mbps", "-5mbit", "0mbit", "1kbit", "101gbit", "nan"])
def test_what_is_no_rate_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"rate|link") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@given(st.integers(int(LOWEST), int(HIGHEST)).map(lambda n: float(f"{n:.4g}")))
def test_a_rate_shown_is_read_back(rate: float) -> None:
    assert parse_rate(show_rate(rate)) == pytest.approx(rate, rel=1e-12)


@given(st.floats(LOWEST, HIGHEST))
def test_the_bucket_holds_two_frames_or_a_fifth_of_a_millisecond(rate: float) -> None:
    words = token_bucket(rate).split()
    bucket = dict(zip(words[::2], words[1::2], strict=True))
    burst, limit = (int(bucket[k].removesuffix("b")) for k in ("burst", "limit"))
    assert burst == pytest.approx(max(2 * 1514, 0.0002 * rate / 8), abs=1)
    assert limit >= 1 << 20


@given(st.one_of(st.none(), st.floats(LOWEST, HIGHEST)))
def test_a_segment_is_a_frame_at_least_and_fits_into_the_bucket(rate: float | None) -> None:
    largest = segment(rate)
    assert 1514 <= largest <= 65536
    if rate is not None:
        burst = int(token_bucket(rate).split()[3].removesuffix("b"))
        assert largest < burst
