"""A worker's gradients and curvatures, against dense ones and what they promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.bench.sparse_logistic.generate import Generated
from commlib.bench.sparse_logistic.rows import Rows, loss, objective
from commlib.bench.sparse_logistic.sparse_worker import ExampleShard


def problem(seed: int) -> tuple[Rows, ExampleShard, Tensor]:
    """Examples, and a worker that has them and some weights."""
    rows = Generated(examples=25, features=30, drawn=6, true=3, seed=seed).rows()
    shard = ExampleShard(rows)
    w = torch.zeros(30)
    for turn in range(3):
        draws = torch.Generator().manual_seed(seed + turn)
        some = shard.keys[torch.rand(shard.keys.numel(), generator=draws) < 0.5]
        w[some] = torch.randn(some.numel(), generator=draws)
        shard.change(some, w[some])
    return rows, shard, w


@given(seed=st.integers(0, 2**32))
def test_the_gradient_is_autograds_and_margins_follow_the_weights(seed: int) -> None:
    rows, shard, w = problem(seed)
    assert shard.loss() == pytest.approx(objective(rows, w, 0.0), rel=1e-9)
    dense = torch.zeros(25, 30, dtype=torch.float64)
    dense[rows.of(), rows.keys] = rows.values.double()
    at = w.double().requires_grad_()
    torch.nn.functional.softplus(-rows.labels.double() * (dense @ at)).sum().backward()
    assert at.grad is not None
    block = shard.between(7, 23)
    assert bool(((block >= 7) & (block < 23)).all())
    assert torch.allclose(shard.slopes(block)[0].double(), at.grad[block], atol=1e-6)


@given(seed=st.integers(0, 2**32), length=st.floats(0, 1))
def test_no_step_within_reach_costs_more_than_gradient_and_curvature_say(seed: int, length: float) -> None:
    rows, shard, w = problem(seed)
    block = shard.between(5, 30)
    g, u = (each.double() for each in shard.slopes(block))
    draws = torch.Generator().manual_seed(seed)
    reach = shard._reach[torch.searchsorted(shard.keys, block)]
    for d in (reach * (2 * torch.rand(block.numel(), generator=draws) - 1) * length, -g.sign() * reach * length):
        moved = w.double()
        moved[block] += d
        now = loss(rows.labels, rows.margins(moved))
        assert now <= shard.loss() + float(g @ d) + float(u @ d**2) / 2 + 1e-5


def test_examples_without_features_and_blocks_without_keys_are_nothing_special() -> None:
    rows = Rows(torch.tensor([0, 0, 1]), torch.tensor([4]), torch.tensor([2.0]), torch.tensor([1.0, -1.0]), 9)
    shard = ExampleShard(rows)
    assert shard.keys.tolist() == [4]
    assert [each.tolist() for each in shard.slopes(shard.between(5, 9))] == [[], []]
    assert [each.tolist() for each in shard.slopes(shard.keys)] == [[1.0], [1.0]]  # ½·2; min(¼, …)·2·2


def test_features_of_great_values_have_a_curvature_that_is_a_number() -> None:
    rows = Rows(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([1e6, 1e-3]), torch.tensor([1.0]), 2)
    shard = ExampleShard(rows)
    shard.change(torch.tensor([0]), torch.tensor([1.0]))  # p(1 - p) is 0, what it may become in reach is not
    u = shard.slopes(shard.keys)[1]
    assert u[0] == pytest.approx(0.25 * 1e6 * (2.1 * 1e6 + 1e-3) / 2.1)
