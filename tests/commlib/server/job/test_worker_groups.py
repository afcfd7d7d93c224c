"""Worker groups × server groups: what may be asked for, who is in which group, and what each topology trains."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commlib
from commlib.server.job.chunks import group_of
from commlib.server.job.consistency import make
from commlib.server.job.worker_groups import Topology
from tests.support.server_cluster import HANG_S, Cluster
from tests.support.tiers import full

STEPS = 6
SEEDING = threading.Lock()  # the generator is the process's, and workers are threads


def model(seed: int = 0) -> nn.Sequential:
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 4)).double()


def backward(trained: nn.Module, rank: int, step: int) -> float:
    g = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 10, generator=g, dtype=torch.float64)
    loss = nn.functional.cross_entropy(trained(x), x[:, :4].argmax(1))
    loss.backward()
    return loss.item()


def state(trained: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in trained.parameters()]


def run(topology: Topology, steps: int = STEPS, **options: object) -> list[tuple[list[Tensor], list[float]]]:
    """Parameters and losses of each worker."""

    def worker(rank: int) -> tuple[list[Tensor], list[float]]:
        trained = model(rank)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        losses = []
        with cluster.join(trained, optimizer, rank, str(topology), nbytes=1200, **options) as server:
            for step in range(steps):
                optimizer.zero_grad()
                losses.append(backward(trained, rank, step))
                server.step()
        return state(trained), losses

    with Cluster(topology.shards, topology.groups * topology.workers) as cluster:
        return cluster.train(worker)


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def in_step(workers: int) -> list[Tensor]:
    """One process: the mean of the workers' gradients, added up in their order."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for step in range(STEPS):
        total: list[Tensor] = []
        for rank in range(workers):
            optimizer.zero_grad()
            backward(trained, rank, step)
            grads = [p.grad.clone() for p in trained.parameters() if p.grad is not None]
            total = [t.add_(g) for t, g in zip(total, grads, strict=True)] if total else grads
        for p, t in zip(trained.parameters(), total, strict=True):
            p.grad = t.div_(workers)
        optimizer.step()
    return state(trained)


@pytest.mark.parametrize("topology", [Topology.sandblaster(), Topology.all_reduce()], ids=str)
def test_one_group_trains_as_one_process_would_to_the_last_bit(topology: Topology) -> None:
    found = run(topology)
    assert all(same(parameters, in_step(3)) for parameters, _ in found)


@pytest.mark.parametrize(
    "topology",
    [
        Topology.hogwild(3, 1, every=3),
        *full(Topology.downpour(), Topology.hogwild(), Topology(4, 1, 2, 2), Topology(3, 2, 2, 1)),
    ],
    ids=str,
)
def test_several_groups_end_with_the_same_bits_and_have_learned(topology: Topology) -> None:
    found = run(topology, steps=40)
    assert all(same(parameters, found[0][0]) for parameters, _ in found)
    for _, losses in found:
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("pull", ["int8", "significance:threshold=0+key_cache"])
def test_groups_send_coded_messages_too(pull: str) -> None:
    found = run(Topology.hogwild(2), steps=20, pull=pull)
    assert all(same(parameters, found[0][0]) for parameters, _ in found)


def test_inside_a_group_all_read_the_same_values_at_every_step() -> None:
    def worker(rank: int) -> list[list[Tensor]]:
        trained = model(rank)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        seen = []
        with cluster.join(trained, optimizer, rank, str(topology)) as server:
            for step in range(STEPS):
                optimizer.zero_grad()
                backward(trained, rank, step)
                server.step()
                server.wait()
                seen.append(state(trained))
        return seen

    topology = Topology(1, 2, 1, 1)
    with Cluster(1, 2) as cluster:
        first, second = cluster.train(worker)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))


def test_every_update_of_every_group_is_in_the_end_once() -> None:
    """Gradients that do not look at the values: the end is the start and their sum, whatever the order."""
    topology = Topology(3, 2, 3, 1)

    def worker(rank: int) -> float:
        held = nn.Linear(1, 1, bias=False).double()
        with torch.no_grad():
            held.weight.fill_(8.0)
        optimizer = torch.optim.SGD(held.parameters(), lr=1.0)
        with cluster.join(held, optimizer, rank, str(topology)) as server:
            for step in range(30):
                optimizer.zero_grad()
                held(torch.ones(1, 1, dtype=torch.float64)).mul((rank + 1) * (step + 1)).sum().backward()
                server.step()
        return held.weight.item()

    with Cluster(topology.shards, 6) as cluster:
        found = cluster.train(worker)
    steps = sum(range(1, 31))
    wanted = 8.0 - sum(steps * ((2 * g + 1) + (2 * g + 2)) / 2 for g in range(3))
    assert found == [wanted] * 6


def test_a_group_that_has_gone_holds_nobody_up_and_its_updates_stay() -> None:
    topology = Topology.hogwild(2)

    def worker(rank: int) -> list[Tensor]:
        trained = model(rank)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
        server = cluster.join(trained, optimizer, rank, str(topology))
        for step in range(5 if rank else 12):
            if step == 11:
                assert gone.wait(HANG_S)
            optimizer.zero_grad()
            backward(trained, rank, step)
            server.step()
        server.close()
        if rank:
            gone.set()
        return state(trained)

    gone = threading.Event()
    with Cluster(2, 2) as cluster:
        found = cluster.train(worker)
    assert not same(found[0], found[1])  # group 0 has gone on


def test_workers_and_shards_are_in_their_groups() -> None:
    topology = Topology(4, 2, 2, 3)
    assert [topology.group(w) for w in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [topology.server_group(w) for w in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert topology.shards == 6
    assert make(str(topology)) == topology
    assert [group_of(key) for key in ("w[0:3]", "w[0:3]+2", "w[0:3]@1", "a@7[0:3]+2@0", "a@7[0:3]")] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("groups:groups=0", "groups must be 1 or more"),
        ("groups:workers=0", "workers must be 1 or more"),
        ("groups:every=0", "every must be 1 or more"),
        ("groups:groups=2,server_groups=3", "3 groups of servers for 2 of workers"),
        ("groups:server=3", "unknown option 'server'"),
        ("groups:groups=two", "a whole number"),
    ],
)
def test_what_is_no_topology_is_refused(spec: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make(spec)


@pytest.mark.parametrize(
    ("topology", "options", "why"),
    [
        (Topology.downpour(), {"workers": 3, "rank": 0}, "is of 4 workers, and there are 3"),
        (Topology.hogwild(2), {"workers": 2, "rank": 0, "copies": 2}, "copies must be 1"),
        (Topology.hogwild(2), {"workers": 2, "rank": 0, "late": True}, "nobody can come late"),
    ],
)
def test_who_cannot_follow_it_is_told_before_anybody_waits(
    topology: Topology, options: dict[str, Any], why: str
) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=why):
        commlib.ParameterServer(trained, optimizer, topology, "127.0.0.1:1", **options)


def test_groups_of_servers_save_no_snapshots(tmp_path: object) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="save no snapshots"):
        commlib.ParameterServer(trained, optimizer, Topology.hogwild(2), workers=2, rank=0, snapshots=str(tmp_path))


def test_one_of_several_groups_of_servers_that_is_lost_ends_it_with_a_name() -> None:
    topology = Topology.hogwild(2)

    def worker(rank: int) -> str:
        trained = model(rank)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        try:
            with cluster.join(trained, optimizer, rank, str(topology)) as server:
                for step in range(10_000):
                    if rank == 0 and step == 3:
                        cluster.stops[1].set()
                    optimizer.zero_grad()
                    backward(trained, rank, step)
                    server.step()
        except commlib.CommlibError as e:
            return str(e)
        return "nothing"

    with Cluster(2, 2) as cluster:
        found = cluster.train(worker)
    assert all("groups of servers need all of their shards" in told for told in found)


@pytest.mark.full
def test_embedded_servers_are_as_many_as_the_topology_says() -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with commlib.ParameterServer(trained, optimizer, Topology(1, 1, 1, 2), workers=1, rank=0, nbytes=1200) as server:
        assert server._worker.job.shards == 2
        for step in range(3):
            optimizer.zero_grad()
            backward(trained, 0, step)
            server.step()
    with pytest.raises(ValueError, match="is of 2 shards, and there are 3"):
        commlib.ParameterServer(trained, optimizer, Topology(1, 1, 1, 2), "embedded:3", workers=1, rank=0)
