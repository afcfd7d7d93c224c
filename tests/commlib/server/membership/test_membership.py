"""Members come, leave and are lost while a training runs; jobs go on from snapshots."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commlib
from commlib.server.storage.snapshot_policy import Snapshots
from tests.support.server_cluster import HANG_S, Cluster, until
from tests.support.tiers import full

SEEDING = threading.Lock()


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    with SEEDING:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 100), nn.Tanh(), nn.Linear(100, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, server: Any, rank: int, number: int) -> None:
    g = torch.Generator().manual_seed(1000 * rank + number)
    optimizer.zero_grad()
    (model(torch.randn(8, 20, generator=g)) - 1.0).square().mean().backward()
    server.step()


def state(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def trained(cluster: Cluster, steps: int, events: dict[int, Any] | None = None, **options: Any) -> list[list[Tensor]]:
    """What workers that go in step have in the end; ``events``: before which step of worker 0 what is done."""

    def worker(rank: int) -> list[Tensor]:
        model, optimizer = make()
        with cluster.join(model, optimizer, rank, "bsp", nbytes=1024, **options) as server:
            for number in range(server.begun_at, steps):
                if rank == 0 and number in (events or {}):
                    (events or {})[number]()
                step(model, optimizer, server, rank, number)
        return state(model)

    return cluster.train(worker)


@pytest.fixture(scope="module")
def undisturbed() -> list[Tensor]:
    with Cluster(2, 2) as cluster:
        return trained(cluster, 30)[0]


def test_shards_that_come_and_leave_change_no_bit_of_what_is_trained(undisturbed: list[Tensor]) -> None:
    def come() -> None:
        cluster.shard()
        until(lambda: cluster.shards_in_use() == 3)  # it is taken in, and owns its share two views later

    def leave() -> None:
        cluster.stops[0].set()
        until(lambda: bool(cluster.ends))

    with Cluster(2, 2) as cluster:
        found = trained(cluster, 30, {8: come, 16: leave})
    assert all(same(each, undisturbed) for each in found)
    assert any("was given up in view" in why for why in cluster.ends)
    assert cluster.ends.count("all workers have left") == 2


def test_a_worker_that_comes_late_takes_the_values_as_they_are_and_takes_part() -> None:
    late: list[Any] = []

    def come() -> None:
        model, optimizer = make()
        server = cluster.join(model, optimizer, None, "ssp:3", nbytes=1024)
        came.set()
        late.append(any(not torch.equal(a, b) for a, b in zip(state(model), state(make()[0]), strict=True)))
        for number in range(5):
            step(model, optimizer, server, 9, number)
        server.close()
        late.append("done")

    def worker(rank: int) -> list[Tensor]:
        model, optimizer = make()
        with cluster.join(model, optimizer, rank, "ssp:3", nbytes=1024) as server:
            for number in range(30):
                if rank == 0 and number == 10:
                    threads.append(threading.Thread(target=come, daemon=True))
                    threads[0].start()
                if number == 14:  # as far as the others can be before it comes
                    assert came.wait(HANG_S)
                step(model, optimizer, server, rank, number)
        return state(model)

    threads: list[threading.Thread] = []
    came = threading.Event()
    with Cluster(2, 2) as cluster:
        found = cluster.train(worker)
        threads[0].join(HANG_S)
    assert late == [True, "done"]
    assert len(found) == 2


def test_a_latecomer_with_another_model_fails_alone() -> None:
    errors: list[str] = []

    def come() -> None:
        model = nn.Linear(2, 2)
        try:
            cluster.join(model, torch.optim.SGD(model.parameters(), lr=0.1), None, "bsp")
        except commlib.PlanMismatch as e:
            errors.append(str(e))

    with Cluster(1, 2) as cluster:
        trained(cluster, 6, {3: come})
    assert "this model has weight where who came first has 0.weight" in errors[0]


@pytest.mark.parametrize("copies", [2, *full(1)])
def test_a_job_that_goes_on_from_snapshots_ends_as_if_it_had_not_stopped(
    tmp_path: Path, undisturbed: list[Tensor], copies: int
) -> None:
    with Cluster(2, 2, snapshots=Snapshots(str(tmp_path), 5)) as cluster:
        trained(cluster, 17, {16: lambda: until(lambda: len(list(tmp_path.glob("*-15.snapshot"))) == 2)}, copies=copies)
    with Cluster(2, 2, snapshots=Snapshots(str(tmp_path), 5, restore=True)) as cluster:
        begun: list[int] = []

        def worker(rank: int) -> list[Tensor]:
            model, optimizer = make()
            with cluster.join(model, optimizer, rank, "bsp", nbytes=1024, copies=copies) as server:
                begun.append(server.begun_at)
                for number in range(server.begun_at, 30):
                    step(model, optimizer, server, rank, number)
            return state(model)

        found = cluster.train(worker)
    assert begun == [15, 15]
    assert all(same(each, undisturbed) for each in found)


def test_snapshots_of_another_job_are_neither_taken_nor_mixed_with(tmp_path: Path) -> None:
    with Cluster(1, 1, snapshots=Snapshots(str(tmp_path), 2)) as cluster:
        trained(cluster, 6, {5: lambda: until(lambda: bool(list(tmp_path.glob("*-4.snapshot"))))})
    mixed, nothing = r"has snapshots: go on from them \(restore\)", "are of another model or optimizer than this job's"
    with (
        Cluster(1, 1, snapshots=Snapshots(str(tmp_path), 2)) as cluster,
        pytest.raises(commlib.CommlibError, match=mixed),
    ):
        trained(cluster, 6)
    with Cluster(1, 1, snapshots=Snapshots(str(tmp_path), 2, restore=True)) as cluster:
        model = nn.Linear(5, 5)
        with pytest.raises(commlib.CommlibError, match=nothing):
            cluster.join(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)


def test_nothing_to_go_on_from_is_said(tmp_path: Path) -> None:
    snapshots, said = Snapshots(str(tmp_path / "none"), 2, restore=True), r"nothing to go on from: .*none has no snap"
    with Cluster(1, 1, snapshots=snapshots) as cluster, pytest.raises(commlib.CommlibError, match=said):
        trained(cluster, 6)


def test_a_folder_that_cannot_be_written_stops_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    with Cluster(1, 1, snapshots=Snapshots(str(occupied), 2)) as cluster:
        trained(cluster, 6, {5: lambda: until(lambda: "no snapshot of shard" in caplog.text)})
    assert cluster.ends == ["all workers have left"]
    assert "no snapshot of shard" in caplog.text
