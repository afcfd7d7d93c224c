"""The whole method, a thread for each rank: it comes to the optimum, with filters and without."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from commlib.bench.sparse_logistic.byte_counters import InThreads
from commlib.bench.sparse_logistic.generate import Generated
from commlib.bench.sparse_logistic.partition import SparsePartition
from commlib.bench.sparse_logistic.protocol import Kind, Line
from commlib.bench.sparse_logistic.rows import Rows, objective
from commlib.bench.sparse_logistic.solve import Outcome, in_threads, play
from commlib.codecs.filter import Content
from commlib.errors import CommlibError, PeerLost, ProtocolError

FILTERS = "key_cache+fixed_float+lossless"


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Generated(examples=400, features=300, drawn=12, true=15, seed=5).rows()


def plan(rows: Rows, **options: object) -> SparsePartition:
    base = SparsePartition(features=rows.features, examples=len(rows), l1=1.5, blocks=6, timeout=120.0)
    return dataclasses.replace(base, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def optimum(rows: Rows) -> float:
    """Smallest objective, by scikit-learn."""
    dense = np.zeros((len(rows), rows.features))
    dense[rows.of().numpy(), rows.keys.numpy()] = rows.values.numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions want l1_ratio alone, older ones penalty
        model = LogisticRegression(
            penalty="l1", l1_ratio=1, C=1 / 1.5, solver="liblinear", fit_intercept=False, tol=1e-9, max_iter=10_000
        )
        model.fit(dense, rows.labels.numpy())
    return objective(rows, torch.from_numpy(model.coef_[0]), 1.5)


@pytest.mark.parametrize("options", [{}, {"kkt": True}, {"kkt": True, "filters": FILTERS}, {"filters": FILTERS}])
def test_it_comes_to_scikit_learns_optimum(rows: Rows, optimum: float, options: dict[str, object]) -> None:
    found = in_threads(plan(rows, tolerance=1e-7, passes=400, **options), rows)
    assert found.converged
    assert objective(rows, found.weights, 1.5) == pytest.approx(optimum, rel=2e-5)
    assert found.passes[-1].objective == pytest.approx(objective(rows, found.weights, 1.5), rel=1e-6)
    assert found.passes[-1].nonzero == int(found.weights.count_nonzero())


def test_no_pass_makes_the_objective_worse(rows: Rows) -> None:
    course = [p.objective for p in in_threads(plan(rows, tolerance=1e-7), rows).passes]
    assert len(course) > 5
    assert all(b <= a * (1 + 1e-7) for a, b in itertools.pairwise(course))


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (3, 1), (1, 3), (3, 4)])
def test_how_many_servers_and_workers_there_are_changes_nothing_but_rounding(
    rows: Rows, servers: int, workers: int
) -> None:
    """One block, as slices of blocks are the servers' own."""
    one = in_threads(plan(rows, blocks=1, servers=1, workers=2, passes=8, kkt=True), rows)
    other = in_threads(plan(rows, blocks=1, servers=servers, workers=workers, passes=8, kkt=True), rows)
    assert torch.allclose(one.weights, other.weights, atol=1e-4)


def test_the_same_seed_gives_the_same_bits_whoever_comes_first(rows: Rows) -> None:
    runs = [in_threads(plan(rows, kkt=True, filters=FILTERS, passes=9), rows) for _ in range(2)]
    assert torch.equal(runs[0].weights, runs[1].weights)
    other = in_threads(plan(rows, kkt=True, filters=FILTERS, passes=9, seed=1), rows)
    assert not torch.equal(runs[0].weights, other.weights)


@pytest.mark.full
@pytest.mark.parametrize("delay", [1, 50])
def test_with_a_delay_it_comes_to_the_same_optimum(rows: Rows, optimum: float, delay: int) -> None:
    found = in_threads(plan(rows, delay=delay, tolerance=1e-5, passes=300, kkt=True, filters=FILTERS), rows)
    assert found.converged
    assert objective(rows, found.weights, 1.5) == pytest.approx(optimum, rel=1e-3)


def test_the_filter_drops_most_weights_and_brings_all_back_before_the_end(rows: Rows) -> None:
    found = in_threads(plan(rows, kkt=True), rows)
    active = [p.active for p in found.passes]
    assert active[0] == rows.features
    assert min(active) < rows.features / 3
    assert [p.theta >= 1e20 for p in found.passes] == [True] + [False] * (len(active) - 1)
    pushed = [b - a for a, b in itertools.pairwise(found.worker_bytes)]
    assert pushed[-1] > 0.9 * found.worker_bytes[0]  # the last pass was one with all keys
    assert min(pushed) < 0.5 * found.worker_bytes[0]


def total(found: Outcome) -> int:
    return found.worker_bytes[-1] + found.server_bytes[-1]


def test_without_filters_a_key_costs_16_bytes_to_a_server_and_12_back(rows: Rows) -> None:
    found = in_threads(plan(rows, passes=3, tolerance=1e-9), rows)
    keys = sum(int(rows.shard(i, 2).keys.unique().numel()) for i in range(2))
    messages = 2 * 2 * 6  # of a pass, each way
    for each, nbytes in ((found.worker_bytes, 16), (found.server_bytes, 12)):
        assert 0 <= each[2] - each[1] - nbytes * keys <= 120 * (messages + 4)


def test_each_filter_makes_less_of_it_and_a_course_says_when_an_objective_was_reached(rows: Rows) -> None:
    plain = in_threads(plan(rows), rows)
    kkt = in_threads(plan(rows, kkt=True), rows)
    coded = in_threads(plan(rows, filters=FILTERS), rows)
    assert max(total(kkt), total(coded)) < total(plain)
    assert plain.reached(0.0) is None
    assert plain.reached(plain.passes[-1].objective) == total(plain)
    assert plain.reached(plain.passes[0].objective) == plain.worker_bytes[0] + plain.server_bytes[0]


def test_what_the_workers_do_not_have_stays_nought(rows: Rows) -> None:
    wide = dataclasses.replace(rows, features=1000)
    found = in_threads(plan(wide, kkt=True, servers=4, filters=FILTERS), wide)  # two servers own nothing that occurs
    assert not found.weights[300:].any()
    assert found.weights[:300].any()


def test_a_gradient_that_is_not_finite_is_named_with_its_feature_and_its_worker(rows: Rows) -> None:
    values = rows.values.clone()
    values[rows.starts[7]] = float("nan")  # no reader lets that in; example 7 is the second worker's
    with pytest.raises(CommlibError) as caught:
        in_threads(plan(rows, kkt=True), dataclasses.replace(rows, values=values))
    feature = int(rows.keys[rows.starts[7]])
    assert f"rank 3 has a gradient of nan for feature {feature}" in str(caught.value)


def test_a_server_names_the_worker_that_never_comes(rows: Rows) -> None:
    one = plan(rows, servers=1, workers=2, timeout=0.5)
    endpoint, other = InThreads(0), InThreads(1)
    with other:
        other.connect(0, endpoint.address)
        with pytest.raises(PeerLost, match=r"rank 0 has no push of block \d in pass 0 from rank 1, 2: nothing came"):
            play(endpoint, one, [endpoint.address, other.address, other.address], None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"l1": 0.0}, "l1 must be above 0 and finite, got 0.0"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"delay": -1}, "delay must not be negative, got -1"),
        ({"workers": 401}, "401 workers have only 400 examples"),
        ({"filters": "random_skip:keep=0.5"}, "leave entries out, and here every key must come"),
        ({"filters": "significance:threshold=0.1"}, "leave entries out, and here every key must come"),
        ({"filters": "zip"}, "unknown filter 'zip'"),
    ],
)
def test_a_plan_that_cannot_be_says_why(rows: Rows, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(rows, **options)


def test_a_worker_without_examples_is_a_mistake_that_the_server_hears_of(rows: Rows) -> None:
    one = plan(rows, servers=1, workers=1)
    server, worker = InThreads(0), InThreads(1)
    with pytest.raises(ValueError, match="rank 1 is a worker, and has no examples"):
        play(worker, one, [server.address, worker.address], None)
    with pytest.raises(PeerLost, match="rank 1 gave up: ValueError: rank 1 is a worker, and has no examples"):
        play(server, one, [server.address, worker.address], None)


def push(keys: list[int], g: list[float], u: list[float], again: list[int] | None = None) -> list[Content]:
    return [Content(torch.tensor(keys), torch.tensor(g)), Content(torch.tensor(again or keys), torch.tensor(u))]


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (push([1, 2], [1.0, float("inf")], [1.0, 1.0]), "rank 1 pushed a gradient of inf for feature 2"),
        (push([1, 2], [1.0, 1.0], [float("nan"), 1.0]), "rank 1 pushed a curvature of nan for feature 1"),
        (push([1, 2], [1.0, 1.0], [1.0, 1.0], again=[1, 3]), "gradients and curvatures of different keys"),
    ],
)
def test_a_server_refuses_what_is_no_push_and_says_of_whom(rows: Rows, contents: list[Content], said: str) -> None:
    one = plan(rows, servers=1, workers=1, blocks=1)
    server = InThreads(0)
    with InThreads(1) as worker:
        worker.connect(0, server.address)
        Line(worker, 0, rows.features, one.chain(), 0).send(Kind.PUSH, 0, contents)
        with pytest.raises(ProtocolError, match=said):
            play(server, one, [server.address, worker.address], None)
