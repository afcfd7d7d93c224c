"""Layers' factors are issued in one order, whatever becomes ready first."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import CommlibError
from commlib.exchange.factors.order import InterleavedOrder, StepOrder

NAMES = ["c", "b", "a"]


@given(st.lists(st.permutations(NAMES), min_size=1, max_size=3))
def test_every_step_issues_all_layers_in_the_same_order_each_once_it_is_ready(steps: list[list[str]]) -> None:
    order = StepOrder(NAMES)
    for ready in steps:
        issued: list[str] = []
        for i, name in enumerate(ready):
            issued += order.ready(name)
            assert set(issued) <= set(ready[: i + 1])
            assert len(issued) == 3 or NAMES[len(issued)] not in ready[: i + 1]  # nothing waits without need
        assert issued == NAMES
        order.restart(whole=True)


def test_ready_twice_is_issued_once() -> None:
    order = StepOrder(NAMES)
    assert order.ready("c") == ["c"]
    assert order.ready("c") == []


def test_a_layer_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        StepOrder(NAMES).ready("d")


# -- rows and buckets on one communicator -------------------------------------------------------


def backward(order: InterleavedOrder, buckets: list[list[str]], gen: random.Random) -> tuple[list[str], int]:
    """What a rank issues in a pass that meets layers in an order of its own, and some of them not at all.

    Returns:
        Layers, and buckets by number; and how many layers left before DDP asked for their bucket.
    """
    issued: list[str] = []
    early = 0
    for i, bucket in enumerate(buckets):
        met = [name for later in buckets[i:] for name in later if gen.random() < 0.5]  # until DDP asks for this bucket
        gen.shuffle(met)
        for name in met:
            due = order.ready(name)
            early += len(due)
            issued += due
        for name in bucket:
            issued += order.asked(name)
        issued.append(f"bucket {i}")
        due = order.passed(bucket)
        early += len(due)
        issued += due
    order.restart(whole=True)
    return issued, early


@given(st.permutations("abcdefgh"), st.lists(st.integers(0, 8), max_size=4), st.integers(2, 4), st.integers(0, 99))
def test_on_one_communicator_every_rank_issues_rows_and_buckets_in_the_same_order(names, cuts, ranks, seed):
    """DDP has other buckets in the first step than later."""
    ends = [0, *sorted(cuts), 8]
    made = [names[a:b] for a, b in itertools.pairwise(ends)]
    steps = [[names[::-1]], made, made, made]
    orders = [InterleavedOrder() for _ in range(ranks)]
    for step, buckets in enumerate(steps):
        found = [backward(o, buckets, random.Random(f"{seed} {rank} {step}")) for rank, o in enumerate(orders)]
        sequences = [issued for issued, _ in found]
        assert all(s == sequences[0] for s in sequences)
        assert sequences[0] == [x for i, bucket in enumerate(buckets) for x in [*bucket, f"bucket {i}"]]
        assert step > 2 or not any(early for _, early in found)  # which buckets there will be is not known yet


def test_rows_leave_before_their_bucket_once_it_is_known_and_its_turn_has_come() -> None:
    order = InterleavedOrder()
    for _ in range(2):
        assert [order.ready(n) for n in "abc"] == [[], [], []]
        assert order.asked("a") == ["a"]
        assert order.passed(["a"]) == []
        assert order.asked("b") + order.asked("c") == ["b", "c"]
        assert order.passed(["b", "c"]) == []
        order.restart(whole=True)
    assert order.ready("c") == []
    assert order.ready("b") == []  # bucket 0 has not been issued
    assert order.ready("a") == ["a"]
    assert order.asked("a") == []
    assert order.passed(["a"]) == ["b", "c"]
    assert order.asked("b") + order.asked("c") == []


def test_other_buckets_than_in_the_two_steps_before_are_an_error_that_names_both() -> None:
    order = InterleavedOrder()
    for _ in range(2):
        order.passed(["a"])
        order.passed(["b"])
        order.restart(whole=True)
    with pytest.raises(CommlibError, match="bucket 0 has the layers b and not, as in the two steps before, a"):
        order.passed(["b"])


def test_a_step_without_an_exchange_changes_nothing() -> None:
    order = InterleavedOrder()
    for _ in range(2):
        order.passed(["a"])
        order.restart(whole=True)
    order.restart(whole=True)
    assert order.ready("a") == ["a"]


def test_steps_that_broke_off_alike_do_not_make_the_rest_of_a_whole_one_an_error() -> None:
    order = InterleavedOrder()
    for _ in range(2):
        order.passed(["a"])
        order.restart(whole=False)
    assert order.passed(["a"]) == []
    assert order.passed(["b"]) == []
