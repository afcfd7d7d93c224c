"""The share of the machine's cores that was busy: from its text, and on this machine."""

from __future__ import annotations

import os
import sys
import time

import pytest

from commlib.bench.server.ring_throughput import Ticks, busy_share, parse, ticks

LINE = "cpu  100 20 30 800 40 5 3 2 60 7\n"


def test_busy_is_all_but_idle_and_waiting_for_disks() -> None:
    assert parse(LINE) == Ticks(busy=100 + 20 + 30 + 5 + 3 + 2, all=1000)


def test_a_guests_time_is_counted_once() -> None:
    assert parse(LINE) == parse(LINE.replace("60 7", "0 0"))


def test_an_older_kernel_with_fewer_columns_is_read_too() -> None:
    assert parse("cpu 100 20 30 800 50") == Ticks(busy=150, all=1000)


@pytest.mark.parametrize("line", ["", "cpu0 1 2 3 4 5 6 7 8", "cpu 1 2 3 4", "cpu a b c d e f g h"])
def test_what_linux_does_not_write_is_not_read(line: str) -> None:
    assert parse(line) is None


def test_the_share_is_of_the_time_between_two_looks() -> None:
    assert busy_share(Ticks(100, 1000), Ticks(175, 1100)) == 0.75


def test_a_share_stays_in_its_bounds_when_waiting_for_disks_is_counted_back() -> None:
    assert busy_share(Ticks(100, 1000), Ticks(111, 1010)) == 1.0


@pytest.mark.parametrize("pair", [(None, Ticks(1, 2)), (Ticks(1, 2), None), (Ticks(1, 2), Ticks(1, 2))])
def test_there_is_no_share_without_two_looks_some_ticks_apart(pair: tuple[Ticks | None, Ticks | None]) -> None:
    assert busy_share(*pair) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has /proc/stat")
def test_a_process_that_computes_keeps_its_share_of_this_machine_busy() -> None:
    before, begun = ticks(), time.process_time()
    while time.process_time() - begun < 0.3:
        pass
    after = ticks()
    assert before is not None
    assert after is not None
    computed = 0.3 * os.sysconf("SC_CLK_TCK")
    assert after.busy - before.busy >= computed - 2, "ticks of all processes, this one's among them"
    share = busy_share(before, after)
    assert share is not None
    assert share >= (computed - 2) / (after.all - before.all)
