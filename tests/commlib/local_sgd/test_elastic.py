"""Asynchronous elastic averaging: what is conserved, that it learns, and that nobody's NaN reaches the centre."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib.errors import CommlibError
from commlib.local_sgd.elastic import ElasticAveraging
from tests.support.server_cluster import Cluster


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def row(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def join(cluster: Cluster, model: nn.Module, rank: int, **options: Any) -> ElasticAveraging:
    where: dict[str, Any] = {
        "rank": rank,
        "workers": cluster.workers,
        "shards": 2,
        "endpoint": "inproc",
        "timeout": 120.0,
        "patience": 60.0,
    }
    return ElasticAveraging(model, servers=cluster.address, **where, **options)


@pytest.mark.parametrize("pulls", [1, 5])
def test_pulls_conserve_the_sum_of_all_values_and_the_centre(pulls: int) -> None:
    def worker(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        model = network()
        with join(cluster, model, rank, tau=1) as elastic:
            begun = row(model)
            all_have.wait(120)  # or one that came late would begin with what others had moved by then
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0 + rank)
            for _ in range(pulls):
                elastic.step()
            own = row(model)
        return begun, own, row(model)

    all_have = threading.Barrier(3)
    with Cluster(2, 3) as cluster:
        found = cluster.train(worker)
    begun, centre = found[0][0], found[0][2]
    assert all(torch.equal(c, centre) and torch.equal(b, begun) for b, _, c in found)
    moved = sum(own for _, own, _ in found) + centre - 4 * begun
    torch.testing.assert_close(moved, torch.full_like(moved, 1.0 + 2 + 3))
    assert not torch.equal(found[0][1], found[1][1])  # they stay apart


def test_it_learns_as_eamsgd_and_a_nan_moves_its_own_worker_alone() -> None:
    def worker(rank: int) -> tuple[float, float, int, Tensor]:
        model, drawn = network(), torch.Generator().manual_seed(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

        def loss() -> Tensor:
            x = torch.randn(16, 6, generator=drawn)
            error: Tensor = (model(x) - x[:, :2]).square().mean()
            return error

        with join(cluster, model, rank, tau=3, alpha=0.2, optimizer=optimizer) as elastic:
            first = loss().item()
            for step in range(90):
                optimizer.zero_grad()
                (loss() * (float("nan") if (step, rank) == (31, 1) else 1.0)).backward()
                optimizer.step()
                elastic.step()
            with elastic.shared():
                centre = row(model)
            assert centre.isfinite().all()
        return first, loss().item(), elastic.refused, row(model)

    with Cluster(2, 2) as cluster:
        found = cluster.train(worker)
    assert torch.equal(found[0][3], found[1][3])
    assert [refused for _, _, refused, _ in found] == [0, 1]
    assert all(last < 0.2 * first for first, last, _, _ in found)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"tau": 0}, ValueError, "tau is 1 step or more, got 0"),
        ({"alpha": 0.9, "workers": 2, "rank": 0}, ValueError, "alpha must be below"),
        ({"alpha": -1.0}, ValueError, "alpha must be above 0"),
        ({"mean": True}, TypeError, "mean: elastic averaging decides that itself"),
        ({"consistency": "bsp"}, TypeError, "consistency: elastic averaging decides"),
    ],
)
def test_bad_arguments_are_told_before_anybody_waits(options: dict[str, Any], kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        ElasticAveraging(network(), **options)


def test_what_is_closed_says_so() -> None:
    def worker(rank: int) -> None:
        elastic = join(cluster, network(), rank)
        elastic.close()
        elastic.close()
        with pytest.raises(CommlibError, match="has been closed"):
            elastic.step()

    with Cluster(2, 1) as cluster:
        cluster.train(worker)
