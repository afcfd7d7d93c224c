"""Sparse rows against dense ones; the generated problem is what it says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.sparse_logistic.generate import Generated
from commlib.bench.sparse_logistic.rows import objective


@given(seed=st.integers(0, 2**32))
def test_the_objective_is_that_of_the_dense_matrix_and_shards_add_up_to_it(seed: int) -> None:
    rows = Generated(examples=12, features=20, drawn=5, true=2, seed=seed).rows()
    dense = torch.zeros(12, 20, dtype=torch.float64)
    dense[rows.of(), rows.keys] = rows.values.double()
    w = torch.randn(20, generator=torch.Generator().manual_seed(seed))
    margins = rows.labels * (dense @ w.double())
    assert objective(rows, w, 0.5) == pytest.approx(
        float(torch.log1p(torch.exp(-margins)).sum()) + 0.5 * float(w.double().abs().sum())
    )
    assert sum(objective(rows.shard(i, 3), w, 0.0) for i in range(3)) == pytest.approx(objective(rows, w, 0.0))


def test_at_no_weights_an_example_costs_log_2() -> None:
    rows = Generated(examples=30, features=50, true=3).rows()
    assert objective(rows, torch.zeros(50), 1.0) == pytest.approx(30 * math.log(2))


def test_the_generated_problem_follows_from_its_seed_and_few_of_its_features_are_frequent() -> None:
    a, b, c = Generated(2000, 5000).rows(), Generated(2000, 5000).rows(), Generated(2000, 5000, seed=1).rows()
    assert torch.equal(a.keys, b.keys)
    assert torch.equal(a.labels, b.labels)
    assert not torch.equal(a.labels, c.labels)
    often = torch.bincount(a.keys, minlength=5000).sort(descending=True).values
    assert int(often[:500].sum()) > int(often[500:].sum())  # 10 % of them
    assert int(often[0]) > 20 * int(often[500])
    assert a.values.isfinite().all()
    assert 0.3 < float((a.labels > 0).float().mean()) < 0.7
    within = a.of()[1:] == a.of()[:-1]
    assert bool((a.keys[1:] > a.keys[:-1])[within].all())
