"""server.trace(path): each worker's passes, what it waits for, and its keys' way to the shards and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commlib.telemetry.trace import NONE, TraceFailed
from tests.support.server_cluster import Cluster
from tests.support.trace_reader import inside, spans

STEPS = 3


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 30))


def step(model: nn.Module, server: Any) -> None:
    model.zero_grad()
    model(torch.ones(4, 30)).square().mean().backward()
    server.step()


def test_each_workers_file_has_every_keys_pushes_and_pulls_and_its_waits(tmp_path: Path) -> None:
    def worker(rank: int) -> None:
        model = small()
        with cluster.join(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, nbytes=20_000) as server:
            step(model, server)
            server.sync()
            server.trace(tmp_path / "t.json")
            for _ in range(STEPS):
                step(model, server)

    with Cluster(2, 2) as cluster:
        cluster.train(worker)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.rank1.json"]
    for path in tmp_path.iterdir():
        found = spans(path)
        training = found.pop("training")
        keys = {name.removeprefix("push ") for name in training if name.startswith("push ")}
        assert len(keys) > 2
        assert set(found) == keys
        assert [len(training[name]) for name in ("forward", "backward", "step")] == [STEPS] * 3
        for key in keys:
            pushed = training[f"push {key}"]
            assert len(pushed) == len(found[key]["push"]) == STEPS
            # the last is asked anew at the end, whether it was answered or not
            assert STEPS <= len(found[key]["pull"]) <= STEPS + 1
            for backward, handed, way in zip(training["backward"], pushed, found[key]["push"], strict=True):
                assert inside(handed, backward)
                assert handed[0] <= way[0] <= handed[1]
            waits = training[f"wait for {key}"]
            assert len(waits) == STEPS  # in two forward passes, and at the end
            for wait, forward in zip(waits, training["forward"][1:], strict=False):
                assert inside(wait, forward)


def test_a_block_ends_it_while_the_server_goes_on_and_nothing_is_recorded_of_a_path_that_cannot_be(
    tmp_path: Path,
) -> None:
    def worker(rank: int) -> None:
        model: Any = small()
        with cluster.join(model, torch.optim.SGD(model.parameters(), lr=0.1), rank) as server:
            with pytest.raises(TraceFailed, match="No such file"):
                server.trace(tmp_path / "none" / "t.json")
            step(model, server)
            with server.trace(tmp_path / "t.json"):
                step(model, server)
                with pytest.raises(ValueError, match="is being recorded"):
                    server.trace(tmp_path / "t.json")
            step(model, server)
            assert server._syncer.trace is NONE
        assert not model._forward_hooks

    with Cluster(1, 1) as cluster:
        cluster.train(worker)
    assert len(spans(tmp_path / "t.json")["training"]["backward"]) == 1


def test_an_error_leaves_a_whole_file(tmp_path: Path) -> None:
    def worker(rank: int) -> None:
        model = small()
        with cluster.join(model, torch.optim.SGD(model.parameters(), lr=0.1), rank) as server:
            server.trace(tmp_path / "t.json")
            step(model, server)
            raise KeyError("x")

    with Cluster(1, 1) as cluster, pytest.raises(KeyError):
        cluster.train(worker)
    assert len(spans(tmp_path / "t.json")["training"]["backward"]) == 1
