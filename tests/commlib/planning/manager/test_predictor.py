"""What is known of a step's pass: a link in use slows it down, and predictions count with that."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.messaging.link_model import AlphaBeta, Link
from commlib.planning.manager.candidates import CandidateModel, routes
from commlib.planning.manager.measurements import Measurements
from commlib.planning.manager.predictor import Predictor
from commlib.runtime.layers import LayerSpec

LINK = Link(4, AlphaBeta(1e-4, 1e-7), AlphaBeta(1e-4, 1e-7))
SHAPES = [(300, 400), (100, 300), (50, 100)]
NAMES = [f"l{i}" for i in range(len(SHAPES))]


def model() -> CandidateModel:
    specs = [
        LayerSpec(f"{n}.weight", shape, torch.float32, torch.device("cpu"), "linear.weight", layer=n)
        for n, shape in zip(NAMES, SHAPES, strict=True)
    ]
    return CandidateModel(specs, NAMES)


def dense_steps(span: float, gaps: list[float]) -> Measurements:
    """Layers' buckets so many seconds one after the other, the last layer's first."""
    ready = tuple(sum(gaps[: i + 1]) for i in range(3))
    names = tuple((f"{n}.weight",) for n in reversed(NAMES))
    seen = {n: t - 1e-3 for n, t in zip(reversed(NAMES), ready, strict=True)}
    rows = dict.fromkeys(NAMES, 4)
    return Measurements(5, span, 0.0, ready, names, ready[-1], seen, rows, arithmetic="alike")


def known(drag: float, f: Measurements) -> Predictor:
    found = Predictor(model())
    found.computed(dataclasses.replace(f, products=dict.fromkeys(NAMES, (1e-4, 4e-4))))
    found.link = dataclasses.replace(LINK, drag=drag)
    found.dense_steps(f, watched=True)
    return found


GAPS = st.lists(st.floats(2e-3, 0.1), min_size=3, max_size=3)


@given(st.floats(1, 8), GAPS, st.floats(0, 0.1))
def test_dense_steps_come_out_of_the_pass_that_they_were_taken_apart_into(
    drag: float, gaps: list[float], more: float
) -> None:
    span = sum(gaps) + more
    assert known(drag, dense_steps(span, gaps)).choose({}).dense_s == pytest.approx(span)


def test_where_transfers_slow_the_pass_down_layers_are_changed_that_would_hide_behind_it() -> None:
    f = dense_steps(0.192, [0.02, 0.05, 0.05])
    assert "l1" not in routes(known(1.0, f).choose(dict.fromkeys(["l0", "l2"], "barred")), {})
    changed = known(4.0, f).choose(dict.fromkeys(["l0", "l2"], "barred"))
    assert set(routes(changed, {})) == {"l1"}
    assert changed.seconds < changed.dense_s


def test_a_trial_is_taken_apart_by_the_ways_it_took_and_remembered_as_it_came_out() -> None:
    found = known(2.0, dense_steps(0.15, [0.02, 0.05, 0.05]))
    choice = found.choose({})
    assert routes(choice, {})
    found.trial_steps(dense_steps(0.09, [0.02, 0.03, 0.03]), choice.ways)
    again = found.choose({})
    assert again.dense_s == pytest.approx(0.15)
    assert found.took(again, 0.1).seconds == 0.1
    assert found.choose({}).seconds == pytest.approx(0.1)


def test_another_link_slows_the_same_pass_down_by_its_own_drag() -> None:
    found = known(2.0, dense_steps(0.15, [0.02, 0.05, 0.05]))
    before = found.choose({}).dense_s
    found.link = dataclasses.replace(LINK, drag=4.0)
    assert found.choose({}).dense_s > before
    found.link = LINK
    assert found.choose({}).dense_s < before
