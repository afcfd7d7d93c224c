"""The whole method over the parameter server: it comes to the optimum, with filters and without, and what is sent."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.sparse_logistic.generate import Generated
from commlib.bench.sparse_logistic.processes import in_processes
from commlib.bench.sparse_logistic.rows import Rows, objective
from commlib.bench.sparse_logistic.settings import SparseSettings
from commlib.bench.sparse_logistic.solve import ExampleShard, Solved, solve
from commlib.errors import CommlibError
from commlib.server.worker.session import WorkerTerms
from tests.support.server_cluster import TIMEOUT, Cluster
from tests.support.tiers import full

FILTERS = "key_cache+fixed_float+lossless"
SOURCE = Generated(examples=400, features=300, drawn=12, true=15, seed=5)
BASE = SparseSettings(features=300, l1=1.5, blocks=6, lr=4.0)


@pytest.fixture(scope="module")
def rows() -> Rows:
    return SOURCE.rows()


def run(rows: Rows, **options: object) -> Solved:
    """A run whose shards and workers are threads."""
    settings = dataclasses.replace(BASE, **options)  # type: ignore[arg-type]

    def worker(rank: int) -> Solved:
        terms = WorkerTerms(cluster.address, rank=rank, endpoint="inproc", timeout=TIMEOUT)
        return solve(terms, settings, rows.shard(rank, settings.workers))

    with Cluster(settings.servers, settings.workers) as cluster:
        return Solved.of(cluster.train(worker))


@pytest.fixture(scope="module")
def optimum(rows: Rows) -> float:
    """Smallest objective, by scikit-learn."""
    from sklearn.linear_model import LogisticRegression  # for two seconds

    dense = np.zeros((len(rows), rows.features))
    dense[rows.of().numpy(), rows.keys.numpy()] = rows.values.numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions want l1_ratio alone, older ones penalty
        model = LogisticRegression(
            penalty="l1", l1_ratio=1, C=1 / 1.5, solver="liblinear", fit_intercept=False, tol=1e-9, max_iter=10_000
        )
        model.fit(dense, rows.labels.numpy())
    return objective(rows, torch.from_numpy(model.coef_[0]), 1.5)


@pytest.mark.parametrize(
    "options", [{}, {"kkt": True, "filters": FILTERS}, *full({"kkt": True}, {"filters": FILTERS}, {"delay": 3})]
)
def test_it_comes_to_scikit_learns_optimum(rows: Rows, optimum: float, options: dict[str, object]) -> None:
    found = run(rows, **options)
    assert found.converged
    assert objective(rows, found.weights, 1.5) == pytest.approx(optimum, rel=1e-3)
    last = found.passes[-1]
    assert last.objective == pytest.approx(objective(rows, found.weights, 1.5), rel=1e-6)
    assert last.nonzero == int(found.weights.count_nonzero()) < 60


def test_the_filters_leave_most_bytes_out_and_the_last_pass_leaves_out_nothing(rows: Rows) -> None:
    plain, found = run(rows, passes=8, tolerance=1e-9), run(rows, passes=8, tolerance=1e-9, kkt=True, filters=FILTERS)
    sent = [b - a for a, b in itertools.pairwise([0, *(p.sent for p in found.passes)])]
    assert max(sent[:7]) < sent[7]
    assert found.passes[-1].sent < 0.75 * plain.passes[-1].sent
    assert found.passes[-1].objective == pytest.approx(plain.passes[-1].objective, rel=0.01)


def test_it_ends_only_after_a_pass_that_leaves_nothing_out(rows: Rows) -> None:
    found = run(rows, kkt=True, refresh=3, tolerance=0.5)
    assert found.converged
    assert len(found.passes) % 3 == 0
    assert len(run(rows, tolerance=0.9).passes) == 1


def test_without_filters_a_feature_costs_4_bytes_to_a_shard_and_4_back(rows: Rows) -> None:
    found = run(rows, passes=3, tolerance=1e-9)
    messages = 2 * (6 + 1)  # of a pass: two workers, blocks and the objective
    for name in ("sent", "received"):
        second, third = (getattr(found.passes[i], name) for i in (1, 2))
        assert 0 < third - second - 2 * 4 * rows.features <= 250 * messages


def test_the_same_seed_gives_the_same_bits_whoever_comes_first(rows: Rows) -> None:
    options = {"kkt": True, "filters": FILTERS, "passes": 4}
    first, second, other = run(rows, **options), run(rows, **options), run(rows, **options, seed=1)
    assert torch.equal(first.weights, second.weights)
    assert not torch.equal(first.weights, other.weights)


@pytest.mark.parametrize(("servers", "workers"), [(3, 1), (1, 3)])
def test_how_many_servers_and_workers_there_are_changes_nothing_but_rounding(
    rows: Rows, servers: int, workers: int
) -> None:
    one, other = run(rows, passes=4), run(rows, passes=4, servers=servers, workers=workers)
    assert torch.allclose(one.weights, other.weights, atol=1e-3)


def test_processes_over_tcp_do_what_threads_do_bit_for_bit(rows: Rows) -> None:
    options: dict[str, object] = {"kkt": True, "filters": FILTERS, "passes": 3}
    said: list[int] = []
    (found,) = in_processes(SOURCE, [dataclasses.replace(BASE, **options)], said.append)  # type: ignore[arg-type]
    threads = run(rows, **options)
    assert said == [0]
    assert torch.equal(found.weights, threads.weights)
    assert [p.objective for p in found.passes] == [p.objective for p in threads.passes]


def test_a_block_of_several_chunks_and_features_that_nobody_has(rows: Rows) -> None:
    wide = dataclasses.replace(rows, features=1_200_000)
    options = {"passes": 2, "blocks": 1, "filters": "lossless", "workers": 1, "servers": 1}
    narrow, found = run(rows, **options), run(wide, **options, features=wide.features)
    assert torch.equal(found.weights[:300], narrow.weights)
    assert not found.weights[300:].any()


def test_examples_that_are_no_numbers_end_the_run_and_the_worker_is_named(rows: Rows) -> None:
    values = rows.values.clone()
    values[rows.starts[7]] = float("nan")  # no reader lets that in; example 7 is the second worker's
    with pytest.raises(CommlibError, match=r"after pass 0, .*were not finite: give a smaller --lr, or scale"):
        run(dataclasses.replace(rows, values=values), kkt=True)


@given(seed=st.integers(0, 2**32))
def test_the_gradient_is_autograds_and_margins_follow_the_weights(seed: int) -> None:
    few = Generated(examples=25, features=30, drawn=6, true=3, seed=seed).rows()
    shard, draws = ExampleShard(few), torch.Generator().manual_seed(seed)
    for low, high in ((0, 12), (12, 30), (5, 20)):
        shard.change(low, torch.randn(high - low, generator=draws))
    assert shard.loss() == pytest.approx(objective(few, shard.weights, 0.0), rel=1e-9)
    dense = torch.zeros(25, 30, dtype=torch.float64)
    dense[few.of(), few.keys] = few.values.double()
    at = shard.weights.double().requires_grad_()
    torch.nn.functional.softplus(-few.labels.double() * (dense @ at)).sum().backward()
    assert at.grad is not None
    assert torch.allclose(shard.gradient(7, 23).double(), at.grad[7:23], atol=1e-6)


def test_examples_without_features_and_blocks_without_entries_are_nothing_special() -> None:
    few = Rows(torch.tensor([0, 0, 1]), torch.tensor([4]), torch.tensor([2.0]), torch.tensor([1.0, -1.0]), 9)
    shard = ExampleShard(few)
    assert shard.gradient(5, 9).tolist() == [0.0] * 4
    assert shard.gradient(4, 5).tolist() == [1.0]
