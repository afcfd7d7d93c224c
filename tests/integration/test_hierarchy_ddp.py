"""A hierarchy over real processes, as nodes × local ranks: replicas, plain DDP, bytes, delays."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange.throttled_group import Throttle
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import Trainer, same_everywhere, through_delays, torchrun

SHAPES = [(2, 2), (3, 2), (2, 3)]
ROUTES = ("none", "fp16", "onebit@gather", "onebit@scatter_gather", "int8@scatter_gather", "dgc:ratio=0.05", "qsgd")
MIXED = {"0.*": "onebit@scatter_gather", "2.*": "none", "*": "topk:ratio=0.1@gather"}


def trainer(world: World, rule: Any, local: int, **options: Any) -> Trainer:
    with torchrun(world, local):
        return Trainer(world, rule, hierarchy=True, **options)


class Odd(nn.Module):
    """Layers that do not share out evenly: one row, one value, a scalar, primes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.one = nn.Linear(11, 13), nn.Linear(13, 1), nn.Parameter(torch.ones(1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(torch.tanh(self.a(x))) * self.scale + self.one
        return out


def replicas(world: World, local: int, rules: list[Any], steps: int) -> list[tuple[str, str, int, int]]:
    found = []
    for rule in rules:
        t = trainer(world, rule, local)
        finite = t.train(steps)
        stats = t.comm.stats()
        t.close()
        assert stats.steps == steps
        assert all(finite)
        assert same_everywhere(world, t.weights()), rule
        assert stats.inter_bytes is not None
        found.append((str(rule), t.comm.plan.about, stats.wire_bytes, stats.inter_bytes))
    return found


@pytest.mark.parametrize(("nodes", "local", "steps"), [(2, 2, 3), *full(*((n, k, 20) for n, k in SHAPES))])
def test_replicas_are_bitwise_equal_after_many_steps(fleet: Fleet, nodes: int, local: int, steps: int):
    reports = fleet.run(nodes * local, replicas, local, [*ROUTES, MIXED], steps)
    for _, about, wire, inter in (row for report in reports for row in report):
        assert about == f"dense inside a node of {local}, routes between {nodes} nodes"
        assert 0 < inter < wire
    # between nodes all ranks together send 2(N−1) gradients, and inside every node 2(L−1)
    values = 4 * (64 * 48 + 48 + 48 * 48 + 48 + 48 * 5 + 5)
    assert sum(report[0][3] for report in reports) == pytest.approx(steps * 2 * (nodes - 1) * values, abs=10)
    inside = sum(report[0][2] - report[0][3] for report in reports)
    dense = steps * 2 * nodes * (local - 1) * values
    assert dense <= inside + 10 < 1.1 * dense


def gradients(world: World, module: nn.Module, x: Tensor, local: int | None, rule: str = "none") -> list[Tensor]:
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0005)
    comm = None
    if local is not None:
        with torchrun(world, local):
            comm = commlib.attach(ddp, rule, hierarchy=True, min_size=0)
    for _ in range(2):  # DDP makes its buckets anew after the first
        module.zero_grad()
        ddp(x).sum().backward()
    if comm is not None:
        comm.close()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def odd_model(world: World, local: int) -> float:
    x = torch.randn(4, 11, generator=torch.Generator().manual_seed(world.rank))
    plain = gradients(world, Odd(), x, None)
    levels = gradients(world, Odd(), x, local)
    assert len(plain) == len(levels) == 6
    assert same_everywhere(world, torch.cat([g.view(-1) for g in levels]))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(plain, levels, strict=True))


@pytest.mark.parametrize(("nodes", "local"), SHAPES)
def test_dense_is_plain_ddp_but_for_the_order_of_sums_with_rows_that_do_not_divide(
    fleet: Fleet, nodes: int, local: int
):
    assert max(fleet.run(nodes * local, odd_model, local)) < 2e-6


def whole_numbers(world: World, local: int) -> bool:
    x = torch.randint(-9, 9, (4, 8), generator=torch.Generator().manual_seed(world.rank)).float()
    plain = gradients(world, nn.Linear(8, 5), x, None)
    levels = gradients(world, nn.Linear(8, 5), x, local)
    return all(torch.equal(a, b) for a, b in zip(plain, levels, strict=True))


def test_with_whole_numbers_dense_is_plain_ddp_exactly(fleet: Fleet):
    assert fleet.run(4, whole_numbers, 2) == [True] * 4


def delayed(world: World, rule: Any, repetitions: int) -> tuple[bool, bool]:
    unchanged, equal, naps = through_delays(lambda: trainer(world, rule, 2, cap=0.001), repetitions)
    assert naps > 8 * repetitions  # the delays were really there, in every round of more than one bucket
    return unchanged, equal


@pytest.mark.parametrize(("size", "steps"), [(4, 6), *full((4, 50), (6, 50))])
def test_random_delays_between_rounds_change_nothing(fleet: Fleet, size: int, steps: int):
    rule = {"0.*": "onebit@scatter_gather", "2.weight": "int8@gather", "*": "topk:ratio=0.1@gather"}
    for unchanged, equal in fleet.run(size, delayed, rule, steps):
        assert unchanged
        assert equal


def limited(world: World) -> tuple[bool, list[float], int, float, float]:
    """Two levels without a limit and with one.

    Returns:
        Whether the gradients are the same; bytes that were held up, without and with; bytes between nodes; seconds
        of the shortest of three steps under the limit, and those that what goes between nodes must take.
    """
    grads, taken, take = [], list[float](), Throttle.take
    patched: Any = Throttle

    def counted(throttle: Throttle, nbytes: float) -> float:
        taken[-1] += nbytes
        return take(throttle, nbytes)

    patched.take = counted
    limit = commlib.RateLimit(20)
    try:
        for each in (None, limit):
            taken.append(0.0)
            ddp = DistributedDataParallel(nn.Linear(1024, 1024, bias=False))
            with torchrun(world, 2):
                comm = commlib.attach(ddp, "none", hierarchy=True, limit=each)
            tries = []
            for _ in range(3):
                ddp.zero_grad()
                dist.barrier()
                start = time.perf_counter()
                ddp(torch.full((2, 1024), world.rank + 1.0)).sum().backward()
                tries.append(time.perf_counter() - start)
            grads.append(ddp.module.weight.grad.clone())
            between = comm.stats().inter_bytes or 0
            comm.close()
    finally:
        patched.take = take
    return torch.equal(*grads), taken, between, min(tries), limit.seconds(between / 3 - limit.at_once)


def test_under_a_limit_the_result_is_the_same_and_takes_as_long_as_what_goes_between_nodes_must(fleet: Fleet) -> None:
    for same, (free, held), between, seconds, least in fleet.run(4, limited):
        assert same
        assert free == 0
        assert held == between > 0  # a node's inside, as many bytes again, is not limited
        assert seconds > least > 0
