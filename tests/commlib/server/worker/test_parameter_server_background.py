"""With gradients and values moved in the background a training is the same, to the last bit, and ends as well."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from commlib.errors import PeerLost
from tests.support.server_cluster import HANG_S, Cluster, until

STEPS = 6


class Wandering(nn.Module):
    """A layer of which is left out in one step, and whose order changes in another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 300), nn.Linear(300, 4)
        self.middle = nn.ModuleList([nn.Linear(300, 300) for _ in range(3)])

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = torch.tanh(self.first(x))
        layers = [layer for i, layer in enumerate(self.middle) if step != 3 or i != 1]
        for layer in reversed(layers) if step == 4 else layers:
            x = x + torch.tanh(layer(x))
        out: Tensor = self.last(x)
        return out


def train(background: bool) -> tuple[list[list[Tensor]], list[int]]:
    plans = [0, 0]

    def worker(rank: int) -> list[Tensor]:
        model = Wandering()
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with cluster.join(model, made, rank, nbytes=100_000, background=background) as server:
            for step in range(STEPS):
                made.zero_grad(set_to_none=step % 2 == 0)
                with server.no_sync():
                    _backward(model, rank, step, 1)
                _backward(model, rank, step, 2)
                server.step()
            if server._cache is not None:
                plans[rank] = server._cache.plans
        return [p.detach().clone() for p in model.parameters()]

    with Cluster(2, 2) as cluster:
        return cluster.train(worker), plans


def _backward(model: Wandering, rank: int, step: int, part: int) -> None:
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + 10 * rank + part))
    model(x, step).square().mean().backward()


def test_the_values_are_those_of_a_run_without_to_the_last_bit_whatever_the_order_is() -> None:
    plain, _ = train(background=False)
    found, plans = train(background=True)
    for own in found:
        assert all(torch.equal(a, b) for a, b in zip(own, plain[0], strict=True))
    # The first step, which values are taken before, too, is what two more are; then 3, 4 and 5 are each another.
    assert plans == [4, 4]


def test_a_worker_that_waits_in_vain_says_for_what_and_its_threads_end() -> None:
    done = threading.Event()

    def worker(rank: int) -> str:
        model = nn.Sequential(nn.Linear(4, 4))
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with cluster.join(model, made, rank, background=True) as server:
                if rank:
                    assert done.wait(HANG_S)
                    return ""
                server._worker.client._timeout = 0.5
                model(torch.ones(1, 4)).sum().backward()
                server.step()
                model(torch.ones(1, 4))
        except PeerLost as e:
            return str(e)
        finally:
            done.set()
        return "nothing"

    with Cluster(1, 2) as cluster:
        found = cluster.train(worker)
    assert "waited 0.5 s for values of 0.weight" in found[0]
    until(lambda: not any(t.name.startswith("commlib-cache") for t in threading.enumerate()))


@pytest.mark.parametrize(
    ("spec", "scaler", "message"),
    [("wsp:local=1", None, "that push in every step"), ("bsp", torch.amp.GradScaler("cpu"), "leave scaler out")],
)
def test_what_cannot_be_moved_in_the_background_is_refused(spec: str, scaler: object, message: str) -> None:
    model = nn.Linear(2, 2)
    cluster = Cluster(0, 1)
    with cluster, pytest.raises(ValueError, match=message):
        cluster.join(model, torch.optim.SGD(model.parameters()), 0, spec, scaler=scaler, background=True)
