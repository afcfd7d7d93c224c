"""Training with a parameter server: what one process would compute, with every rule; and what is wrong is named."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from commlib.server.worker import parameter_server
from tests.support.rank_pool import Fleet
from tests.support.server_cluster import HANG_S, Cluster
from tests.support.tiers import full

STEPS = 5
SEEDING = threading.Lock()  # the generator is the process's, and workers are threads
Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def make(seed: int = 0) -> nn.Sequential:
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4))


def batch(rank: int, step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(size, 20, generator=g)
    return x, x[:, :4].argmax(1)


def backward(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def state(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def serial(workers: int, optimizer: Make, schedule: Callable[[torch.optim.Optimizer, int], None]) -> list[Tensor]:
    """One process: gradients of all workers, added up in their order, and divided by how many they are."""
    model = make()
    made = optimizer(list(model.parameters()))
    for step in range(STEPS):
        total: list[Tensor] = []
        for rank in range(workers):
            model.zero_grad()
            backward(model, rank, step)
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            total = [t.add_(g) for t, g in zip(total, grads, strict=True)] if total else grads
        for p, t in zip(model.parameters(), total, strict=True):
            p.grad = t.div_(workers)
        schedule(made, step)
        made.step()
    return state(model)


def warm_up(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * (step + 1) / STEPS


def constant(optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


OPTIMIZERS: dict[str, Make] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.05),  # looks at whole matrices
}


@pytest.mark.parametrize("copies", [2, *full(1)])  # with 2, what is urgent goes first, too
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [warm_up, *full(constant)])
def test_in_bulk_three_workers_train_as_one_process_would_to_the_last_bit(
    name: str, schedule: Callable[[torch.optim.Optimizer, int], None], copies: int
) -> None:
    optimizer = OPTIMIZERS[name]

    def worker(rank: int) -> list[Tensor]:
        model = make(rank)
        made = optimizer(list(model.parameters()))
        with cluster.join(model, made, rank, copies=copies, priority=copies == 2, nbytes=50_000) as server:
            for step in range(STEPS):
                made.zero_grad()
                schedule(made, step)
                backward(model, rank, step)
                server.step()
        return state(model)

    with Cluster(2, 3) as cluster:
        found = cluster.train(worker)
    expected = serial(3, optimizer, schedule)
    assert all(same(each, expected) for each in found)


@pytest.mark.parametrize("spec", ["ssp:2", "asp", "dtssp", "downpour"])
def test_replicas_are_the_same_to_the_last_bit_at_the_end_and_have_learned(spec: str) -> None:
    def worker(rank: int) -> tuple[list[Tensor], float, float]:
        model = make(rank)
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.join(model, made, rank, spec) as server:
            losses = []
            for step in range(40):
                made.zero_grad()
                losses.append(backward(model, rank, step).item())
                server.step()
        return state(model), sum(losses[:5]), sum(losses[-5:])

    with Cluster(2, 3) as cluster:
        found = cluster.train(worker)
    assert all(same(each, found[0][0]) for each, _, _ in found)
    assert all(after < 0.8 * before for _, before, after in found)


FILTERS = "significance:threshold=0.001+key_cache+fixed_float+lossless"


@pytest.mark.parametrize(
    ("spec", "push", "pull"),
    [
        ("bsp", FILTERS, FILTERS.replace("0.001", "0.0001")),
        ("ssp:2", "onebit", "onebit"),
        *full(
            ("bsp", "onebit", "onebit"),
            ("bsp", "topk:ratio=0.05", "int8"),
            ("bsp", "powersgd", "fp16"),
            ("asp", "random_skip:keep=0.1", "lossless"),
        ),
    ],
)
def test_coded_messages_are_smaller_and_it_learns_the_same_and_all_end_with_the_shards_values(
    spec: str, push: str, pull: str
) -> None:
    def worker(rank: int, *coded: str) -> tuple[list[Tensor], list[Tensor], list[float], int]:
        model = make(rank)
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.join(model, made, rank, spec, push=coded[0], pull=coded[1], copies=2) as server:
            begun = server.sent + server.received
            losses = []
            for step in range(40):
                made.zero_grad()
                losses.append(backward(model, rank, step).item())
                server.step()
            server.wait()
            before, used = state(model), server.sent + server.received - begun
        return before, state(model), losses, used

    with Cluster(2, 2) as cluster:
        plain = cluster.train(lambda rank: worker(rank, "none", "none"))
    with Cluster(2, 2) as cluster:
        found = cluster.train(lambda rank: worker(rank, push, pull))
    assert same(found[0][1], found[1][1])
    assert same(found[0][0], found[1][0]) or spec != "bsp"
    assert found[0][3] < 0.8 * plain[0][3]
    assert sum(found[0][2][-5:]) < 0.75 * sum(found[0][2][:5])


def alone(model: nn.Module, steps: int, skipped: int = -1) -> list[Tensor]:
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        made.zero_grad()
        backward(model, 0, step)
        if step != skipped:
            made.step()
    return state(model)


@pytest.mark.parametrize("spec", ["downpour:push=3,fetch=3", "downpour:fetch=5", "wsp:local=2"])
def test_one_worker_that_pushes_and_fetches_now_and_then_trains_as_it_would_alone(spec: str) -> None:
    def worker(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        model = make()
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.join(model, made, rank, spec) as server:
            for step in range(10):
                made.zero_grad()
                backward(model, rank, step)
                server.step()
            before = state(model)
        return before, state(model)

    with Cluster(2, 1) as cluster:
        before, found = cluster.train(worker)[0]
    expected = alone(make(), 10)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    if spec == "downpour:push=3,fetch=3":  # the tenth step was its own
        for a, b in zip(before, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "options", "of_sent", "of_received"),
    [
        ("downpour:push=5,fetch=5", {}, 0.2, 0.2),
        ("wsp:distance=1,local=3", {}, 0.25, 0.25),
        ("ssp:4", {"cache": True}, 1.0, 0.7),
        *full(("asp", {}, 1.0, 1.0), ("downpour:fetch=5", {}, 1.0, 0.2)),
    ],
)
def test_between_pushes_and_fetches_nothing_is_sent_and_it_learns(
    spec: str, options: dict[str, Any], of_sent: float, of_received: float
) -> None:
    steps, in_step = 60, threading.Barrier(3)  # how much a cache saves depends on how far workers are apart

    def worker(rank: int) -> tuple[list[Tensor], list[float], float, float]:
        model = make(rank)
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.join(model, made, rank, spec, **options) as server:
            sent, received, losses = server.sent, server.received, []
            for step in range(steps):
                in_step.wait(HANG_S)
                made.zero_grad()
                losses.append(backward(model, rank, step).item())
                server.step()
            server.wait()
            sent, received = server.sent - sent, server.received - received
        return state(model), losses, sent, received

    with Cluster(2, 3) as cluster:
        found = cluster.train(worker)
    values = sum(p.nbytes for p in make().parameters()) * steps
    for replica, losses, sent, received in found:
        assert same(replica, found[0][0])
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
        assert sent == pytest.approx(of_sent * values, rel=0.1)
        assert received < 1.1 * of_received * values


def test_values_in_a_cache_are_never_older_than_the_rule_allows() -> None:
    def worker(rank: int) -> int:
        model = make()
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.join(model, made, rank, "ssp:3", cache=True) as server:
            kept = 0
            for step in range(30):
                made.zero_grad()
                backward(model, rank, step)
                for key, included in server._syncer._rhythm._included.items():
                    others = {w: n for w, n in included.items() if w != rank}
                    assert all(n >= step - 3 for n in others.values()), (key, step, included)
                server.step()
                kept += sum(key not in server._syncer._asked for key in server._syncer._chunks)
        return kept

    with Cluster(2, 3) as cluster:
        assert all(kept > 0 for kept in cluster.train(worker))


def test_of_gradients_that_add_up_one_that_is_not_finite_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def worker(rank: int) -> list[Tensor]:
        model = make()
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.join(model, made, rank, "downpour:push=4,fetch=4") as server:
            for step in range(10):
                made.zero_grad()
                backward(model, rank, step)
                if step == 5:
                    weight = next(model.parameters())
                    assert weight.grad is not None
                    weight.grad[0, 0] = torch.nan
                server.step()
        return state(model)

    with Cluster(1, 1) as cluster:
        found = cluster.train(worker)[0]
    for a, b in zip(found, alone(make(), 10, skipped=5), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert "the gradient of 0.weight is not finite: this worker leaves its step out" in caplog.text


def test_gradients_of_values_that_are_too_old_count_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def worker(rank: int) -> tuple[list[Tensor], int]:
        model = make()
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.join(model, made, rank, "downpour:time_lag=0.2") as server:
            for _ in range(2):
                made.zero_grad()
                loss = nn.functional.cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1])
                time.sleep(0.5)
                loss.backward()
                server.step()
            server.sync()
            refused = server.refused
        return state(model), refused

    with Cluster(1, 1) as cluster:
        found, refused = cluster.train(worker)[0]
    assert same(found, state(make()))
    assert refused >= 2
    assert "it is not finite, or older than 0.2 s" in caplog.text


def ddp(world: World) -> list[Tensor]:
    model = DistributedDataParallel(make())
    made = OPTIMIZERS["sgd"](list(model.parameters()))
    for step in range(STEPS):
        made.zero_grad()
        backward(model, world.rank, step)
        made.step()
    return state(model)


def embedded(world: World) -> list[Tensor]:
    model = make(world.rank)
    made = OPTIMIZERS["sgd"](list(model.parameters()))
    with commlib.ParameterServer(model, made, commlib.BSP(), timeout=200, patience=60) as server:
        for step in range(STEPS):
            made.zero_grad()
            backward(model, world.rank, step)
            server.step()
    return state(model)


@pytest.mark.full
def test_with_an_embedded_shard_ranks_get_what_ddp_gives_them_but_for_the_order_of_sums(fleet: Fleet) -> None:
    expected, found = fleet.run(3, ddp)[0], fleet.run(3, embedded)
    assert all(same(each, found[0]) for each in found)
    for a, b in zip(found[0], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Odd(nn.Module):
    """Tied weights, one used without its module's forward(), one used now and then, one frozen, one channels_last."""

    def __init__(self) -> None:
        super().__init__()
        SEEDING.acquire()
        torch.manual_seed(0)
        self.inner = nn.Linear(20, 20)
        self.tied = nn.Linear(20, 20)
        self.tied.weight = self.inner.weight
        self.direct = nn.Linear(20, 20)
        self.sometimes = nn.Linear(20, 20)
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        conv: Any = nn.Conv2d(2, 4, 2)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.last = nn.Linear(20 + 4 * 3 * 4, 4)
        self.with_it = True
        SEEDING.release()

    def forward(self, x: Tensor) -> Tensor:
        y = self.tied(torch.tanh(self.inner(x)))
        y = nn.functional.linear(torch.tanh(y), self.direct.weight, self.direct.bias)
        if self.with_it:
            y = y + self.sometimes(x)
        picture = self.conv(torch.cat([x, x], 1)[:, :40].view(-1, 2, 4, 5)).flatten(1)
        return self.last(torch.cat([self.frozen(y), picture], 1))  # type: ignore[no-any-return]


def odd_step(model: Odd, rank: int, step: int) -> None:
    model.with_it = (rank + step) % 3 == 0 and step != 2  # in step 2 nobody, in others one of three
    backward(model, rank, step)


def test_tied_unused_and_frozen_parameters_and_those_used_without_their_module_are_right() -> None:
    def worker(rank: int) -> list[Tensor]:
        model = Odd()
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with cluster.join(model, made, rank, nbytes=1024) as server:
            for step in range(STEPS):
                made.zero_grad()
                odd_step(model, rank, step)
                server.step()
        return state(model)

    with Cluster(2, 3) as cluster:
        found = cluster.train(worker)
    assert all(same(each, found[0]) for each in found)
    model = Odd()
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        made.zero_grad()
        for rank in range(3):
            odd_step(model, rank, step)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(3)
        made.step()
    for (name, p), q in zip(model.named_parameters(), found[0], strict=True):
        torch.testing.assert_close(q, p.detach(), rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(q, p.detach()) or name != "never.weight"


def test_gradients_accumulated_in_no_sync_go_with_the_next() -> None:
    def worker(rank: int) -> list[Tensor]:
        model = make()
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.join(model, made, rank) as server:
            for step in range(STEPS):
                made.zero_grad()
                with server.no_sync():
                    backward(model, rank, 2 * step)
                backward(model, rank, 2 * step + 1)
                server.step()
        return state(model)

    with Cluster(1, 2) as cluster:
        found = cluster.train(worker)
    model = make()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        made.zero_grad()
        for rank in range(2):
            backward(model, rank, 2 * step)
            backward(model, rank, 2 * step + 1)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(2)
        made.step()
    for a, b in zip(found[0], model.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-6)


def test_as_a_sum_steps_are_as_many_times_as_large_as_there_are_workers() -> None:
    def worker(rank: int, **options: Any) -> list[Tensor]:
        model = make()
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.join(model, made, rank, **options) as server:
            backward(model, rank, 0)
            server.step()
        return state(model)

    with Cluster(1, 2) as cluster:
        mean = cluster.train(worker)[0]
    with Cluster(1, 2) as cluster:
        total = cluster.train(functools.partial(worker, mean=False))[0]
    for start, a, b in zip(state(make()), mean, total, strict=True):
        torch.testing.assert_close(b - start, 2 * (a - start), rtol=1e-3, atol=1e-6)


class Leaving:
    """Session that notes how it is closed."""

    def __init__(self) -> None:
        self.closed, self.flushed = False, list[bool]()

    def close(self, *, flush: bool) -> None:
        self.flushed.append(flush)


@pytest.mark.parametrize("failed", [False, True])
def test_an_error_before_makes_no_close_hasty_but_that_at_the_end_of_the_process(
    failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("sys.last_value", raising=False)
    if failed:  # as in an interactive session, which goes on
        monkeypatch.setattr("sys.last_value", ValueError(), raising=False)
    session: Any = Leaving()
    parameter_server._go(session, None, 1.0, wait=True)
    parameter_server._go_at_exit(session, None, 1.0, wait=True)
    assert session.flushed == [True, not failed]
