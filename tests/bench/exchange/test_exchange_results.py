"""Rows from visits, by hand."""

from __future__ import annotations

import io

import pytest

from commlib.bench.exchange.combinations import BASELINE, Pair
from commlib.bench.exchange.results import hidden, rows, spread
from commlib.bench.exchange.trial import ExchangeTrial, TrialShare, affordable
from commlib.bench.lab import Counters
from commlib.bench.results.socket_counters import SocketCounters
from commlib.bench.results.table import print_rows

ONEBIT = Pair("onebit", "gather")


def share(seconds: list[float], accounted: int, sent: int | None) -> TrialShare:
    traffic = None if sent is None else SocketCounters(sent, 7, 0)
    return TrialShare(seconds, accounted, 8000, traffic, {"compress": 0.2, "wire": 0.4, "decompress": 0.6})


def dense(*seconds: float) -> ExchangeTrial:
    return ExchangeTrial(BASELINE, [share(list(seconds), 8000, 8800)] * 2, Counters(20_000, 20, 20_000, 20, 0))


def test_bytes_are_of_a_rank_and_a_step_and_seconds_of_the_slowest_rank() -> None:
    halves = [
        ExchangeTrial(
            ONEBIT, [share([0.1, 0.2], 1000, 1200), share([0.3, 0.1], 3000, 3200)], Counters(6000, 6, 9, 9, 0)
        ),
        ExchangeTrial(
            ONEBIT, [share([0.4, 0.5], 1000, 1200), share([0.1, 0.1], 3000, 3200)], Counters(6000, 6, 9, 9, 0)
        ),
    ]
    base, row = rows(
        [halves[0], dense(1.0, 2.0), halves[1]], [BASELINE, ONEBIT], model="m", parameters=5, line_gbit_s=2e-5
    )
    assert base["vs_dense"] == 1.0
    assert base["step_s"] == 1.5
    assert row["accounted_bytes"] == 1000  # (1000 + 3000) / 2 ranks / 2 steps
    assert row["socket_bytes"] == 1100
    assert row["overhead"] == pytest.approx(0.1)
    assert row["interface_bytes"] == 1500
    assert row["dense_bytes"] == 4000
    assert row["times_fewer"] == 4.0
    assert (row["compress_s"], row["wire_s"], row["decompress_s"]) == pytest.approx((0.1, 0.2, 0.3))
    assert row["step_s"] == pytest.approx(0.35)  # of 0.3, 0.2, 0.4, 0.5
    assert row["wire_gbit_s"] == pytest.approx(1100 * 8e-9 / 0.35)
    assert row["of_line"] == pytest.approx(1100 * 8e-9 / 0.35 / 2e-5)
    assert row["vs_dense"] == pytest.approx(1.5 / 0.35)
    assert list(base) == list(row)


def test_what_is_not_known_stays_open() -> None:
    visit = ExchangeTrial(BASELINE, [share([1.0], 8000, None), share([1.0], 8000, 9000)])
    (row,) = rows([visit], [BASELINE, ONEBIT], model="m", parameters=5, line_gbit_s=None)
    open_ = ("socket_bytes", "overhead", "interface_bytes", "spread", "wire_gbit_s", "of_line")
    assert [row[c] for c in open_] == [None] * len(open_)
    assert row["accounted_bytes"] == 8000


def test_spread_is_the_middle_half_over_the_median() -> None:
    assert spread([1.0]) is None
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("width", [80, 100, 120, 160, 400])
def test_a_table_fits_and_keeps_what_matters(width: int) -> None:
    table = rows([dense(1.0, 2.0)], [BASELINE], model="resnet50", parameters=25_557_032, line_gbit_s=0.2)
    out = hidden(table, width)
    shown = [c for c in table[0] if c not in out]
    assert {"exchange", "codec", "times_fewer", "step_s", "vs_dense"} <= set(shown)
    printed = io.StringIO()
    print_rows([{c: row[c] for c in shown} for row in table], file=printed)
    assert max(map(len, printed.getvalue().splitlines())) <= width
    assert {"model", "parameters"} <= set(out)  # in the title
    if width == 400:
        assert set(out) == {"model", "parameters"}


def test_as_many_steps_as_there_is_time_for_but_one_at_least() -> None:
    assert affordable(1.0, 0.3, 10) == 3
    assert affordable(-1.0, 0.3, 10) == 1
    assert affordable(1000.0, 0.3, 10) == 10
    assert affordable(1.0, 0.0, 10) == 10
