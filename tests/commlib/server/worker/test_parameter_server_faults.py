"""What goes wrong with a parameter server is named, in time, and to whom it concerns."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from tests.support.server_cluster import HANG_S, Cluster, until


def make(width: int = 6) -> tuple[nn.Sequential, torch.optim.SGD]:
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(3, 5)).square().sum() * factor).backward()


@contextlib.contextmanager
def alone(spec: str = "bsp", **options: Any) -> Iterator[tuple[nn.Module, torch.optim.SGD, commlib.ParameterServer]]:
    with Cluster(1, 1) as cluster:
        model, optimizer = make()
        with cluster.join(model, optimizer, 0, spec, **options) as server:
            yield model, optimizer, server


def test_another_model_is_named_by_what_differs_and_nobody_waits_for_it() -> None:
    def worker(rank: int) -> None:
        if rank:
            cluster.await_job()
        model, optimizer = make(6 + rank)
        cluster.join(model, optimizer, rank).close()

    with Cluster(1, 2, timeout=600) as cluster:  # longer than what outcomes() takes for hanging
        first, second = cluster.outcomes(worker)
    assert isinstance(second, commlib.PlanMismatch)
    assert "0.weight is float32 of (7, 5) here, and float32 of (6, 5) at who came first" in str(second)
    assert isinstance(first, commlib.CommlibError)
    assert "worker 1 cannot take part: 0.weight is float32 of (7, 5)" in str(first)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mean": False}, "mean: False here, and True at who came first"),
        ({"copies": 1, "patience": 3.0}, "patience: 3.0 here, and 60.0 at"),
        ({"lost": "fail"}, "lost: 'fail' here, and 'go on' at"),
        ({"push": "onebit"}, "push: 'onebit' here, and 'none' at"),
    ],
)
def test_other_rules_are_named(options: dict[str, Any], said: str) -> None:
    def worker(rank: int) -> None:
        if rank:
            cluster.await_job()
        model, optimizer = make()
        cluster.join(model, optimizer, rank, **(options if rank else {})).close()

    with Cluster(1, 2) as cluster:
        assert said in str(cluster.outcomes(worker)[1])


def test_a_wrong_world_size_is_named() -> None:
    def worker(rank: int) -> None:
        if rank:
            cluster.await_job()
        model, optimizer = make()
        cluster.workers = 2 + rank
        cluster.join(model, optimizer, rank).close()

    with Cluster(1, 2) as cluster:
        assert "workers: 3 here, and 2 at who came first" in str(cluster.outcomes(worker)[1])


def test_who_does_not_come_is_named_within_the_deadline() -> None:
    with Cluster(2, 3) as cluster:
        cluster.await_shards()
        model, optimizer = make()
        with pytest.raises(commlib.PeerLost, match=r"for 5 s: 2 of 2 shards came, and 1 of 3 workers; not 1, 2"):
            cluster.join(model, optimizer, 0, timeout=5)


def test_a_worker_that_does_not_push_is_named_by_those_who_wait() -> None:
    def worker(rank: int) -> None:
        model, optimizer = make()
        server = cluster.join(model, optimizer, rank)
        if rank == 0:
            backward(model)
            server.step()
            server._worker.client._timeout = 1.0  # this wait only: all before may take longer on a busy machine
            with pytest.raises(
                commlib.PeerLost, match=r"worker 0 waited 1 s for values of .* at its clock 1; .*1 at 0"
            ):
                backward(model)
            server._worker.client._timeout = HANG_S
            done.set()
        else:
            assert done.wait(HANG_S)
        server._leave()

    done = threading.Event()
    with Cluster(1, 2) as cluster:
        cluster.train(worker)


def test_no_meeting_place_is_said_with_its_address() -> None:
    with socket.socket() as held:  # nobody else can have this port, and nobody listens there
        held.bind(("127.0.0.1", 0))
        model, optimizer, at = *make(), f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(commlib.CommlibError, match=f"no rendezvous server at {re.escape(at)} after 1 s"):
            commlib.ParameterServer(model, optimizer, "bsp", at, timeout=1)


@pytest.mark.parametrize("servers", ["nowhere", "localhost:", "localhost:99999", ":1", "embedded:0", "embedded:two"])
def test_a_bad_address_is_refused(servers: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT"):
        commlib.ParameterServer(*make(), "bsp", servers)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"consistency": "ssp:-1"}, "staleness must be 0 or more"),
        ({"consistency": "sps:3"}, "unknown consistency 'sps'"),
        ({"copies": 2}, "2 copies of a key need as many shards, and there are 1"),
        ({"copies": 0}, "copies must be 1 or more"),
        ({"lost": "panic"}, "lost is 'go on' or 'fail', got 'panic'"),
        ({"rank": 3, "workers": 2}, "this is worker 3 of 2"),
        ({"nbytes": 3}, "nbytes must be 1024 or more"),
        ({"patience": 0.0}, "patience must be 0.1 or more"),
        ({"endpoint": "pigeon"}, "unknown endpoint 'pigeon'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with Cluster(0, 1) as cluster, pytest.raises(ValueError, match=said):
        commlib.ParameterServer(*make(), **{"consistency": "bsp", "servers": cluster.address, "timeout": 60, **options})


def test_an_optimizer_that_lacks_a_parameter_and_one_of_the_users_own_are_refused() -> None:
    model, _ = make()
    partly = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"the optimizer lacks 2\.weight, 2\.bias"):
        commlib.ParameterServer(model, partly, "bsp", "127.0.0.1:1")

    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(
        ValueError, match=r"shards know the optimizers of torch\.optim and commlib\.runtime\.proximal, and .*Mine is"
    ):
        commlib.ParameterServer(model, Mine(model.parameters(), lr=0.1), "bsp", "127.0.0.1:1")


def test_a_model_in_ddp_is_refused() -> None:
    with pytest.raises(TypeError, match="would average gradients too: give the module that it wraps"):
        commlib.ParameterServer(DistributedDataParallel.__new__(DistributedDataParallel), make()[1])


def test_pushes_that_are_not_finite_are_refused_with_the_workers_name_and_leave_no_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def worker(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        model, optimizer = make()
        with cluster.join(model, optimizer, rank) as server:
            for step in range(4):
                optimizer.zero_grad()
                backward(model, float("nan") if (rank, step) == (1, 2) else 1.0)
                server.step()
            server.sync()
            assert server.refused == (2 if rank == 1 else 0) * len(server._syncer._chunks) // 2
        return [p.detach().clone() for p in model.parameters()]

    with Cluster(1, 2) as cluster, caplog.at_level(logging.WARNING):
        for values in cluster.train(worker):
            assert all(bool(v.isfinite().all()) for v in values)
    assert "refused push 2 of worker 1 to 0.weight[0:30]+3: it is not finite" in caplog.text


def test_the_users_optimizer_is_not_to_be_stepped() -> None:
    with alone() as (model, optimizer, server):
        backward(model)
        with pytest.raises(commlib.CommlibError, match=r"call server\.step\(\), not optimizer\.step\(\)"):
            optimizer.step()
        server.step()
    optimizer.step()  # it is the user's again


@pytest.mark.parametrize("spec", ["asp", "downpour:push=2"])
def test_a_cache_where_nothing_is_too_old_is_refused_at_once(spec: str) -> None:
    model, optimizer = make()
    with pytest.raises(ValueError, match=f"with {spec.partition(':')[0]}.* no values are too old for a cache"):
        commlib.ParameterServer(model, optimizer, spec, "127.0.0.1:1", cache=True)


def test_a_second_backward_pass_in_a_step_is_refused() -> None:
    with alone() as (model, _, server):
        backward(model)
        with pytest.raises(commlib.CommlibError, match="has a second gradient in one step"):
            backward(model)
        server.step()


def test_no_gradient_leaves_that_was_computed_with_values_of_a_step_before() -> None:
    with alone() as (model, optimizer, server):
        first, last = model[0], model[2]  # type: ignore[index]
        for step in range(3):
            optimizer.zero_grad()
            if step == 2:  # its forward() was called so far, and now it is not: nobody waits for its values
                x = nn.functional.linear(torch.ones(3, 5), first.weight, first.bias)
                with pytest.raises(
                    commlib.CommlibError, match=r"was used without its module's forward\(\), with the val"
                ):
                    nn.functional.linear(x.tanh(), last.weight, last.bias).sum().backward()
                optimizer.zero_grad()
                server.wait()
                x = nn.functional.linear(torch.ones(3, 5), first.weight, first.bias)
                nn.functional.linear(x.tanh(), last.weight, last.bias).sum().backward()
            else:
                backward(model)
            server.step()


def test_after_the_end_there_are_no_steps_and_the_model_is_the_users_again() -> None:
    with alone() as (model, _, server):
        backward(model)
        server.step()
    with pytest.raises(commlib.CommlibError, match="this worker has left the parameter server"):
        server.step()
    server.close()
    backward(model)


def test_an_error_in_the_loop_is_what_is_raised_and_the_others_go_on() -> None:
    def worker(rank: int) -> float:
        model, optimizer = make()
        with cluster.join(model, optimizer, rank) as server:
            for step in range(6):
                if (rank, step) == (1, 3):
                    raise ZeroDivisionError
                optimizer.zero_grad()
                backward(model)
                server.step()
        return float(sum(p.sum().item() for p in model.parameters()))

    with Cluster(1, 3) as cluster:
        first, second, third = cluster.outcomes(worker)
    assert isinstance(second, ZeroDivisionError)
    assert first == third
    assert cluster.ends == ["all workers have left"]


@pytest.mark.parametrize("lr", ["0.1", float("nan"), -1.0])
def test_a_worker_whose_learning_rate_is_none_is_told_and_the_others_go_on(lr: Any) -> None:
    def worker(rank: int) -> list[Tensor]:
        model, optimizer = make()
        with cluster.join(model, optimizer, rank, "asp") as server:
            for step in range(6):
                if rank == 0 and step == 2:
                    optimizer.param_groups[0]["lr"] = lr
                optimizer.zero_grad()
                backward(model, 0.1)
                server.step()
        return [p.detach() for p in model.parameters()]

    with Cluster(2, 2) as cluster:
        first, second = cluster.outcomes(worker)
    assert isinstance(first, commlib.CommlibError)
    assert f"worker 0 has lr={lr!r}, which an optimizer made with 0.1 cannot take" in str(first)
    assert all(bool(p.isfinite().all()) for p in second)
    assert not any("Error" in end for end in cluster.ends)


def test_a_learning_rate_of_numpys_is_a_number() -> None:
    with alone() as (model, optimizer, server):
        before = [p.detach().clone() for p in model.parameters()]
        for lr in (np.float32(0.05), np.float64(0.01), torch.tensor(0.02)):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            backward(model)
            server.step()
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_shard_that_cannot_go_on_ends_by_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def push(*args: object, **options: object) -> None:
        raise TypeError("a mistake of ours")

    with Cluster(1, 1) as cluster:
        model, optimizer = make()
        server = cluster.join(model, optimizer, 0, timeout=20.0, patience=2.0)
        monkeypatch.setattr("commlib.server.shard.chunk_state.ChunkState.push", push)
        backward(model)
        with contextlib.suppress(commlib.CommlibError):
            server.step()
        until(lambda: bool(cluster.ends))
        with contextlib.suppress(commlib.CommlibError):
            server.close()
    (end,) = cluster.ends
    assert re.fullmatch(r"CommlibError: .*shard \S+ cannot go on: TypeError: a mistake of ours", end)
    caplog.clear()  # what is logged with a traceback keeps the cluster
