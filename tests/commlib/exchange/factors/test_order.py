"""Layers' factors are issued in one order, whatever becomes ready first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.exchange.factors.layers import StepOrder

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
        order.restart()


def test_ready_twice_is_issued_once() -> None:
    order = StepOrder(NAMES)
    assert order.ready("c") == ["c"]
    assert order.ready("c") == []


def test_a_layer_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        StepOrder(NAMES).ready("d")
