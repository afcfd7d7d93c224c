"""Rates as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.exchange.rate_limit import read_rate, show_rate


@pytest.mark.parametrize(("text", "rate"), [("50mbit", 5e7), ("0.5 Gbit/s", 5e8), ("64kbit", 64e3), ("9bit", 9.0)])
def test_a_rate_is_read_as_tc_writes_it(text: str, rate: float) -> None:
    assert read_rate(text) == rate


@pytest.mark.parametrize("text", ["", "fast", "50", "50mb", "-5mbit", "nan", "inf", "nanmbit", "1e3mbit", "50 mbit 2"])
def test_what_is_no_rate_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"a rate is a number and kbit, mbit or gbit") as caught:
        read_rate(text)
    assert repr(text) in str(caught.value)


@given(st.integers(1, 10**12).map(lambda n: float(f"{n:.4g}")))
def test_a_rate_shown_is_read_back(rate: float) -> None:
    assert read_rate(show_rate(rate)) == pytest.approx(rate, rel=1e-12)
