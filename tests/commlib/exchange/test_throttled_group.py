"""Valves: what they let through keeps its order and its limit, and they end. One rank of two, in this process."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from commlib.errors import CommlibError
from commlib.exchange.rate_limit import RateLimit
from commlib.exchange.throttled_group import Throttle


@dataclasses.dataclass
class Group:
    """One rank of two, as far as a valve sees it: a collective is through when ``open`` is set."""

    open: threading.Event = dataclasses.field(default_factory=threading.Event)
    issued: list[tuple[float, int]] = dataclasses.field(default_factory=list)  # (when, values)
    fails: int = -1  # the n-th collective does

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[Tensor]) -> Any:
        self.issued.append((time.monotonic(), len(tensors[0])))
        return self

    def wait(self) -> None:
        assert self.open.wait(120)
        if len(self.issued) == self.fails:
            raise RuntimeError("connection closed by peer")


def opened(**options: Any) -> Group:
    group = Group(**options)
    group.open.set()
    return group


def test_without_a_limit_there_is_no_valve() -> None:
    group, throttle = Group(), Throttle(None, 1)
    assert throttle.through(group) is group
    throttle.close()


def test_pieces_leave_one_after_another_and_nothing_waits_but_the_valve() -> None:
    group, throttle = Group(), Throttle(RateLimit(1000, burst=8192), 1)
    valve = throttle.through(group)
    first, second = (valve.allreduce([torch.ones(n)]) for n in (2048, 10))  # 8,192 bytes: two pieces of 4,096
    end = time.monotonic() + 120
    while not group.issued and time.monotonic() < end:
        time.sleep(0.001)
    assert [n for _, n in group.issued] == [1024]  # the rest waits for this one
    group.open.set()
    first.wait()
    second.wait()
    assert [n for _, n in group.issued] == [1024, 1024, 10]
    throttle.close()


def test_valves_share_one_limit() -> None:
    limit = RateLimit(0.8, burst=6000)  # 100,000 bytes a second, in pieces of 2,000
    throttle = Throttle(limit, 2)
    groups = [opened(), opened()]
    works = [throttle.through(g).allreduce([torch.ones(5000)]) for g in groups]  # 20,000 bytes each
    for work in works:
        work.wait()
    throttle.close()
    schedule = sorted(issued for g in groups for issued in g.issued)
    assert sum(n for _, n in schedule) == 10_000
    for i, (a, _) in enumerate(schedule):
        for j, (b, _) in enumerate(schedule[i:], i):
            # naps end late, so a piece may leave late, and the next one in time: one piece a valve
            assert 4 * sum(n for _, n in schedule[i : j + 1]) <= limit.bytes_s * (b - a) + limit.at_once


def test_close_wakes_a_valve_that_naps_for_hours_and_whoever_waits_for_it_is_told() -> None:
    throttle = Throttle(RateLimit(0.001, burst=4096), 1)
    group = opened()
    valve = throttle.through(group)
    works = [valve.allreduce([torch.ones(1_000_000)]) for _ in range(2)]
    throttle.close()
    for work in works:
        with pytest.raises(CommlibError, match="the hook was closed before this could leave"):
            work.wait()
    assert len(group.issued) <= 1


def test_a_valve_goes_on_after_close_with_what_comes_then() -> None:
    throttle = Throttle(RateLimit(100), 1)
    group = opened()
    valve = throttle.through(group)
    for _ in range(2):
        valve.allreduce([torch.ones(3)]).wait()
        throttle.close()
    assert [n for _, n in group.issued] == [3, 3]


def test_after_one_failure_nothing_more_is_issued_and_all_get_its_error() -> None:
    throttle = Throttle(RateLimit(1000), 1)
    group = opened(fails=2)
    valve = throttle.through(group)
    works = [valve.allreduce([torch.ones(1)]) for _ in range(4)]
    works[0].wait()
    for work in works[1:]:
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            work.wait()
    assert len(group.issued) == 2
    throttle.close()
