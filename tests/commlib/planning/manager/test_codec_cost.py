"""What a codec costs is measured where it will run, by running it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from commlib.compressors.int8 import Int8
from commlib.groups.world import World
from commlib.messaging.link_model import AlphaBeta
from commlib.planning.manager import codec_cost
from commlib.planning.manager.codec_cost import CodecCost, measure, slowest
from commlib.planning.route import resolve

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rule", "gathers", "reduces"),
    [
        ("fp16", 0, 1),
        ("onebit@gather", 1, 0),
        ("onebit@scatter_gather", 2, 0),
        ("powersgd:rank=2", 0, 2),
        ("topk:ratio=0.01", 1, 0),
        ("randomk:ratio=0.1@dense", 0, 1),
    ],
)
def test_collectives_are_counted_and_computing_takes_time(rule: str, gathers: int, reduces: int) -> None:
    found = measure(resolve(rule, 4), World(1, 4), CPU, time.perf_counter)
    assert (found.gathers, found.reduces) == (gathers, reduces)
    n = 1 << 21
    assert 0 < found.before.seconds(n) < math.inf
    assert 0 < found.after.seconds(n) < math.inf


def test_more_payloads_take_longer_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where to decode one takes a second, and all else no time: sixteen times as many take sixteen times as long."""
    seconds, decode_sum = [0.0], Int8.decode_sum

    def slow(self: Int8, payloads: Tensor, *args: Any, **options: Any) -> None:
        seconds[0] += len(payloads)
        decode_sum(self, payloads, *args, **options)

    monkeypatch.setattr(Int8, "decode_sum", slow)
    route = resolve("int8@gather", 2)
    few, many = (measure(route, World(0, size), CPU, lambda: seconds[0]) for size in (2, 32))
    assert (few.after.seconds(1 << 21), many.after.seconds(1 << 21)) == (2.0, 32.0)
    assert few.before.seconds(1 << 21) == many.before.seconds(1 << 21) == 0.0


def test_the_line_goes_through_both_sizes_and_never_below_nought(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([((1.0, 4.0), 1, 0), ((3.0, 2.0), 1, 0)])
    monkeypatch.setattr(codec_cost, "_at", lambda *_: next(times))
    found = measure(resolve("fp16", 2), World(0, 2), CPU, time.perf_counter)
    (a, b), (c, d) = codec_cost._SHAPES
    assert found.before.seconds(a * b) == pytest.approx(1.0)
    assert found.before.seconds(c * d) == pytest.approx(3.0)
    assert found.after == AlphaBeta(4.0, 0.0)  # the larger was faster: a constant


def test_of_several_ranks_the_slowest_counts_in_everything() -> None:
    ranks = [CodecCost(AlphaBeta(1, 5), AlphaBeta(2, 2), 2, 0), CodecCost(AlphaBeta(3, 4), AlphaBeta(1, 9), 2, 0)]
    for order in itertools.permutations(ranks):
        assert slowest(list(order)) == CodecCost(AlphaBeta(3, 5), AlphaBeta(2, 9), 2, 0)


def test_it_travels_between_ranks() -> None:
    cost = CodecCost(AlphaBeta(1, 5), AlphaBeta(2, 2), 2, 0)
    assert CodecCost.from_wire(dataclasses.asdict(cost)) == cost
