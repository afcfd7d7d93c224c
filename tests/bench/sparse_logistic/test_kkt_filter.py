"""The KKT filter: what is exactly lossless, what is not, and when all weights come back."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.bench.sparse_logistic.generate import Generated
from commlib.bench.sparse_logistic.kkt_filter import OFF, Active, Rule, Verdict, rests
from commlib.bench.sparse_logistic.proximal_step import REST, step
from commlib.bench.sparse_logistic.sparse_worker import ExampleShard
from tests.support.tiers import examples


def descend(seed: int, *, skip: bool, passes: int = 25, l1: float = 0.4) -> tuple[torch.Tensor, list[int]]:
    """Weights after some passes of proximal gradient, all features at once, and how many were computed in each.

    ``skip`` leaves out those that rest. The curvature is a bound for all weights, so that it does not depend on which
    are left out.
    """
    rows = Generated(examples=80, features=60, drawn=8, true=6, seed=seed).rows()
    shard = ExampleShard(rows)
    keys = shard.keys
    sums = torch.zeros(80, dtype=torch.float64).index_add_(0, rows.of(), rows.values.double().abs())
    bound = torch.zeros(60, dtype=torch.float64)
    bound.index_add_(0, rows.keys, 0.25 * rows.values.double().abs() * sums[rows.of()])
    w, u, reach = torch.zeros(keys.numel()), bound[keys], torch.ones(keys.numel(), dtype=torch.float64)
    computed = []
    for _ in range(passes):
        g = shard.slopes(keys)[0].double()
        new, after = w.clone(), torch.full_like(reach, REST)  # what rests stays, and so does what is known of its reach
        on = ~rests(w, g, l1) if skip else torch.ones_like(w, dtype=torch.bool)
        new[on], after[on] = step(w[on], g[on], u[on], reach[on], l1=l1)
        computed.append(int(on.sum()))
        w, reach = new, after
        shard.change(keys, w)
    return w, computed


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**32))
def test_to_skip_what_rests_for_that_same_gradient_changes_no_bit(seed: int) -> None:
    plain, skipped = descend(seed, skip=False)[0], descend(seed, skip=True)[0]
    assert plain.numpy().tobytes() == skipped.numpy().tobytes()


def test_most_weights_rest() -> None:
    w, computed = descend(3, skip=True)
    assert 0 < int(w.count_nonzero()) <= computed[-1] < w.numel() / 2


@given(g=st.floats(-2, 2), u=st.floats(0, 100), l1=st.floats(0.1, 2), eta=st.floats(0.1, 1), reach=st.floats(0.1, 5))
def test_what_rests_does_not_move_whatever_its_curvature(
    g: float, u: float, l1: float, eta: float, reach: float
) -> None:
    w, one = torch.zeros(1), torch.ones(1, dtype=torch.float64)
    new, after = step(w, g * one, u * one, reach * one, l1=l1, eta=eta)
    if bool(rests(w, g * one, l1)):
        assert float(new) == 0.0
        assert float(after) == REST


def test_for_each_worker_to_skip_by_its_own_gradient_is_not_lossless() -> None:
    """g_p ≤ λ/P everywhere but at one worker: what the others leave out would have moved the weight."""
    shares, l1 = torch.tensor([0.8, 0.1, 0.1, 0.1], dtype=torch.float64), 1.0
    w, u, reach = torch.zeros(1), torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    by_all = shares.sum().view(1)
    by_some = shares[shares.abs() > l1 / len(shares)].sum().view(1)
    assert not rests(w, by_all, l1)
    assert float(step(w, by_all, u, reach, l1=l1)[0]) == pytest.approx(-0.1)
    assert rests(w, by_some, l1)  # and so it would for ever
    assert float(step(w, by_some, u, reach, l1=l1)[0]) == 0.0


def test_what_is_0_and_well_within_becomes_inactive_and_nothing_else() -> None:
    active = Active(5, l1=1.0)
    w, g = torch.tensor([0.0, 0.0, 0.0, 2.0]), torch.tensor([0.5, 0.95, -1.5, 0.0], dtype=torch.float64)
    keys = torch.tensor([0, 1, 3, 4])
    active.decide(keys, w, g)
    assert active.mask.all()  # θ is off at first
    assert active.violation == 0.5
    active.next_pass(Verdict(theta=0.1))
    assert active.violation == 0.0
    active.decide(keys, w, g)
    assert active.mask.tolist() == [False, True, True, True, True]
    active.next_pass(Verdict(theta=OFF, reactivate=True))
    assert active.mask.all()


def test_a_gradient_that_is_no_number_makes_nothing_inactive() -> None:
    active = Active(1, l1=1.0)
    active.next_pass(Verdict(theta=0.0))
    active.decide(torch.tensor([0]), torch.zeros(1), torch.tensor([float("nan")], dtype=torch.float64))
    assert active.mask.all()


def test_a_small_change_brings_all_weights_back_and_only_a_second_one_is_the_end() -> None:
    rule = Rule(1000.0, examples=50, on=True)
    assert rule.after(500.0, 2.0) == Verdict(theta=10 * 2.0 / 50)
    assert rule.after(499.99, 0.5) == Verdict(reactivate=True, theta=10 * 0.5 / 50)
    assert rule.after(490.0, 1.0) == Verdict(theta=10 * 1.0 / 50)  # some of them moved
    assert rule.after(489.99, 0.0) == Verdict(reactivate=True, theta=0.0)
    assert rule.after(489.98, 0.0) == Verdict(stop=True)


def test_without_the_filter_the_first_small_change_is_the_end() -> None:
    rule = Rule(1000.0, examples=50, on=False)
    assert rule.after(500.0, 2.0) == Verdict()
    assert rule.after(499.99, 2.0) == Verdict(stop=True)


def test_a_verdict_is_off_unless_told() -> None:
    assert dataclasses.astuple(Verdict()) == (False, False, OFF)
