"""The server's step: it is the minimum of its model, within reach."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.sparse_logistic.proximal_step import FIRST_REACH, reach_after, relative_change, step, violation


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_three_cases_and_the_clip() -> None:
    w = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.0])
    g, u = f64(-3.0, 3.0, 0.5, -0.2, -9.0), f64(4.0, 4.0, 4.0, 1.0, 1.0)
    new, reach = step(w, g, u, torch.full((5,), FIRST_REACH, dtype=torch.float64), l1=1.0)
    assert new.tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0, 1.0])  # -(g + λ)/u, -(g - λ)/u, 0, to 0, clipped
    assert new[3] == 0.0
    assert reach.tolist() == pytest.approx([1.1, 1.1, 0.1, 1.1, 2.1])


def test_a_feature_without_curvature_moves_as_far_as_it_may_and_no_further() -> None:
    new, _ = step(torch.zeros(1), f64(-2.0), f64(0.0), f64(0.3), l1=1.0)
    assert float(new) == pytest.approx(0.3)


def test_a_smaller_eta_is_a_shorter_step() -> None:
    new = [float(step(torch.zeros(1), f64(-2.0), f64(4.0), f64(1.0), l1=1.0, eta=eta)[0]) for eta in (1.0, 0.5)]
    assert new == pytest.approx([0.25, 0.125])


@given(
    w=st.floats(-3, 3, width=32),
    g=st.floats(-5, 5),
    u=st.floats(0.1, 10),
    reach=st.floats(0.1, 5),
    l1=st.floats(0.1, 3),
)
def test_no_other_weight_within_reach_has_a_smaller_model(
    w: float, g: float, u: float, reach: float, l1: float
) -> None:
    new, after = step(torch.tensor([w]), f64(g), f64(u), f64(reach), l1=l1)

    def model(at: torch.Tensor) -> torch.Tensor:
        return g * (at - w) + u * (at - w) ** 2 / 2 + l1 * at.abs()

    others = torch.linspace(w - reach, w + reach, 201, dtype=torch.float64)
    assert float(model(new.double())) <= float(model(others).min()) + 1e-5
    assert abs(float(new) - w) <= reach + 1e-6
    assert 0.1 <= float(after) <= 5.0
    assert torch.equal(after, reach_after(f64(w), new))


def test_the_violation_is_the_largest_over_weights_that_are_0() -> None:
    w, g = torch.tensor([0.0, 0.0, 1.0]), f64(0.5, -1.75, 9.0)
    assert violation(w, g, 1.0) == 0.75
    assert violation(w[:1], g[:1], 1.0) == 0.0
    assert violation(w[2:], g[2:], 1.0) == 0.0


def test_a_relative_change_is_of_what_was_before_and_none_is_small_without_it() -> None:
    assert relative_change(200.0, 199.0) == pytest.approx(0.005)
    assert relative_change(0.0, 0.0) == 0.0
    assert relative_change(0.0, 1.0) == math.inf
    assert not relative_change(5.0, math.nan) <= 1.0
