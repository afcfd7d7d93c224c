"""A user's model with an L1 penalty over a parameter server, with the KKT filter and without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from commlib.runtime.proximal import ProximalAdagrad
from tests.support.server_cluster import Cluster

EXAMPLES, FEATURES, L1, WORKERS, STEPS = 240, 3000, 0.03, 2, 96
FILTERS = f"kkt:l1={L1},refresh=8+key_cache+fixed_float+lossless"


def problem(rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Examples of a regression in which few features matter: all of them, or one worker's."""
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(EXAMPLES, FEATURES, generator=draws) * (torch.rand(EXAMPLES, FEATURES, generator=draws) < 0.05)
    true = torch.zeros(FEATURES)
    true[torch.randperm(FEATURES, generator=draws)[:12]] = 2.0
    y = x @ true + 0.1 * torch.randn(EXAMPLES, generator=draws)
    return (x, y) if rank is None else (x[rank::WORKERS], y[rank::WORKERS])


def objective(w: Tensor) -> float:
    x, y = problem()
    return float((x @ w - y).square().mean() / 2 + L1 * w.abs().sum())


def train(push: str, pull: str) -> tuple[Tensor, int, int]:
    """Weights at the end, and the bytes that all workers sent and received in all steps."""

    def worker(rank: int) -> tuple[Tensor, int, int]:
        x, y = problem(rank)
        model = nn.Linear(FEATURES, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = ProximalAdagrad(model.parameters(), lr=0.5, l1=L1)
        with cluster.join(model, optimizer, rank, push=push, pull=pull) as server:
            begun = server.sent, server.received
            for _ in range(STEPS):
                optimizer.zero_grad()
                (nn.functional.mse_loss(model(x).view(-1), y) / 2).backward()
                server.step()
            server.wait()
            sent, received = server.sent - begun[0], server.received - begun[1]
        return model.weight.detach().view(-1).clone(), sent, received

    with Cluster(2, WORKERS) as cluster:
        found = cluster.train(worker)
    assert torch.equal(found[0][0], found[1][0])
    return found[0][0], sum(f[1] for f in found), sum(f[2] for f in found)


@pytest.fixture(scope="module")
def plain() -> tuple[Tensor, int, int]:
    return train("none", "none")


def test_with_the_filter_it_comes_to_the_same_weights_with_a_fifth_of_the_bytes(
    plain: tuple[Tensor, int, int],
) -> None:
    expected, sent, received = plain
    assert min(sent, received) >= WORKERS * STEPS * 4 * FEATURES
    found, less_sent, less_received = train(FILTERS, "lossless")
    assert objective(found) == pytest.approx(objective(expected), rel=1e-3)
    assert torch.equal(found.abs() > 0.01, expected.abs() > 0.01)
    assert 0 < int(found.count_nonzero()) < FEATURES / 20
    assert less_sent < sent / 5
    assert less_received < received / 10


def test_it_comes_to_the_optimum_of_plain_proximal_gradient(plain: tuple[Tensor, int, int]) -> None:
    """In float64, with one step size for all weights: 1/L, L being the largest curvature."""
    x, y = (part.double() for part in problem())
    rate = EXAMPLES / float(torch.linalg.matrix_norm(x, 2)) ** 2
    w = torch.zeros(FEATURES, dtype=torch.float64)
    for _ in range(400):
        z = w - rate * (x.T @ (x @ w - y)) / EXAMPLES
        w = z.sign() * (z.abs() - rate * L1).clamp(min=0.0)
    assert objective(plain[0]) == pytest.approx(objective(w.float()), rel=1e-3)


def test_a_gradient_that_is_not_finite_reaches_the_shard_and_is_refused() -> None:
    def worker(rank: int) -> tuple[list[float], int]:
        model = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = ProximalAdagrad(model.parameters(), lr=0.5, l1=1.0)
        with cluster.join(model, optimizer, rank, push="kkt:l1=1.0,refresh=100+lossless") as server:
            for step in range(3):
                optimizer.zero_grad()
                bad = rank == 1 and step == 1
                (model(torch.full((1, 8), 0.5)) * (torch.nan if bad else 0.9)).sum().backward()
                server.step()
            server.sync()
            refused = server.refused
        return model.weight.view(-1).tolist(), refused

    with Cluster(1, WORKERS) as cluster:
        found = cluster.train(worker)
    assert found == [([0.0] * 8, 0), ([0.0] * 8, 1)]
