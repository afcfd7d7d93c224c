"""``factors`` and ``owners`` by NCCL's rules: rows leave early on the communicator of the buckets, in one order."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange.factors import layers
from commlib.exchange.factors.order import InterleavedOrder
from commlib.exchange.factors.rounds import FactorRounds
from commlib.exchange.registry import BY_ROWS
from commlib.groups.world import World
from commlib.testing.accelerator import StreamRace
from commlib.transports.process_group.stream_ordered import CollectivesDiffer, device
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import same_everywhere, step

STEPS = 6
ROWS = 6
BRANCHES = 5


class Branches(nn.Module):
    """Layers beside each other, which a rank calls in an order of its own, and not all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(48 - 4 * i, 40) for i in range(BRANCHES))
        self.last = nn.Linear(40, 3)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        parts: list[Tensor] = [torch.tanh(self.branches[i](x[:, 4 * i :])) for i in order]
        out: Tensor = self.last(sum(parts[1:], start=parts[0]))
        return out


def order_of(world: World, at: int, *, unused: bool) -> list[int]:
    order = random.Random(97 * at + world.rank).sample(range(BRANCHES), BRANCHES)
    return order[: BRANCHES - 1 - (world.rank + at) % 2] if unused else order


def inputs(world: World, at: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(10 * at + world.rank))


def model_of(group: Any, *, unused: bool) -> DistributedDataParallel:
    options: dict[str, Any] = {"bucket_cap_mb": 0.01, "init_sync": False, "gradient_as_bucket_view": True}
    return DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=unused, **options)


def compute(ddp: DistributedDataParallel, world: World, at: int, *, unused: bool) -> None:
    ddp(inputs(world, at), order_of(world, at, unused=unused)).square().mean().backward()


def in_an_order_of_its_own(world: World, rule: str, unused: bool) -> dict[str, Any]:
    early = 0

    def counted(self: InterleavedOrder, name: str, ready: Any = InterleavedOrder.ready) -> list[str]:
        nonlocal early
        due: list[str] = ready(self, name)
        early += len(due)
        return due

    plain = DistributedDataParallel(Branches(), init_sync=False, find_unused_parameters=unused)
    off, waits = 0.0, []
    with device() as (gpu, group):
        ddp = model_of(group, unused=unused)
        with mock.patch.object(InterleavedOrder, "ready", counted):
            comm = commlib.attach(ddp, rule, min_size=0)
            for at in range(STEPS):
                ddp.zero_grad()
                gpu.waits.clear()
                compute(ddp, world, at, unused=unused)
                waits += gpu.waits if at > 2 and not unused else []  # DDP asks the device which ones were used
                gpu.wait(torch.device("cpu"))
                with torch._C._DisableTorchDispatch():
                    plain.zero_grad()
                    compute(plain, world, at, unused=unused)
                    for mine, true in zip(ddp.parameters(), plain.parameters(), strict=True):
                        assert (mine.grad is None) == (true.grad is None)
                        if mine.grad is None or true.grad is None:
                            continue
                        off = max(off, float((mine.grad - true.grad).abs().max() / true.grad.abs().max()))
        grads = [p.grad for p in ddp.parameters() if p.grad is not None]
        routes = {str(p.route) for p in comm.plan if p.spec.layer is not None}
        comm.close()
    return {
        "off": off, "waits": waits, "early": early, "routes": routes, "buckets": len(group.issued),
        "equal": all(same_everywhere(world, g) for g in grads),
    }  # fmt: skip


@pytest.mark.parametrize("unused", [False, *full(True)])
@pytest.mark.parametrize("rule", BY_ROWS)
def test_ranks_that_meet_layers_in_other_orders_issue_one_sequence(fleet: Fleet, rule: str, unused: bool) -> None:
    """Else the group raises an error, where NCCL would hang."""
    for found in fleet.run(2, in_an_order_of_its_own, rule, unused):
        assert found["off"] < 2e-6
        assert found["equal"]
        assert found["waits"] == []
        assert f"none@{rule}" in found["routes"]
        assert found["early"] > 0


class NoOrder(InterleavedOrder):
    """Rows leave as soon as they are ready."""

    def ready(self, name: str) -> list[str]:
        due = [] if name in self._issued else [name]
        self._issued.add(name)
        return due


def as_soon_as_ready(world: World) -> str:
    with device() as (_, group), mock.patch.object(layers, "InterleavedOrder", NoOrder):
        ddp = model_of(group, unused=False)
        comm = commlib.attach(ddp, "factors", min_size=0)
        try:
            for at in range(STEPS):
                ddp.zero_grad()
                compute(ddp, world, at, unused=False)
        except (CollectivesDiffer, commlib.CommlibError) as e:
            return f"{type(e).__name__}: {e}"
        comm.close()
    return "nothing"


def test_rows_that_left_without_regard_to_buckets_would_be_told_so(fleet: Fleet) -> None:
    for said in fleet.run(2, as_soon_as_ready):
        assert "over NCCL" in said


def _nothing(*_: object) -> None:
    """A mock would keep what it is called with."""


def unkept(world: World) -> str:
    with device() as (_, group), mock.patch.object(FactorRounds, "_keep", _nothing):
        ddp = model_of(group, unused=False)
        commlib.attach(ddp, "factors", min_size=0)
        try:
            for at in range(STEPS):
                ddp.zero_grad()
                compute(ddp, world, at, unused=False)
                torch.zeros(1)
        except (StreamRace, commlib.CommlibError) as e:
            return str(e)
    return "nothing"


def test_rows_that_are_not_kept_for_the_stream_that_reads_them_are_a_race(fleet: Fleet) -> None:
    for said in fleet.run(2, unkept):
        assert "record_stream" in said


# -- not the usual step -------------------------------------------------------------------------


def other_steps(world: World, rule: str) -> dict[str, Any]:
    """Batches of other sizes, steps that add up, gradients that are zeros and not None."""
    with device() as (gpu, group):
        ddp = model_of(group, unused=False)
        comm = commlib.attach(ddp, rule, min_size=0)
        every = list(range(BRANCHES))
        for at, rows in enumerate((4, 4, 4 + 3 * world.rank, 60, 4, 2)):
            ddp.zero_grad()
            ddp(inputs(world, at, rows), every).square().mean().backward()
        with ddp.no_sync():
            ddp(inputs(world, 6), every).square().mean().backward()
        ddp(inputs(world, 7), every).square().mean().backward()
        before = str(comm.plan)
        gpu.waits.clear()
        for at in (8, 9):
            ddp.zero_grad(set_to_none=False)
            ddp(inputs(world, at), every).square().mean().backward()
        waits = list(gpu.waits)
        gpu.wait(torch.device("cpu"))
        grads = [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        found = {"before": before, "plan": str(comm.plan), "waits": waits}
        comm.close()
    return found | {"equal": all(same_everywhere(world, g) for g in grads)}


@pytest.mark.parametrize("rule", BY_ROWS)
def test_a_gradient_that_is_there_already_goes_dense_for_nobody_waits_to_see_if_it_is_zeros(fleet: Fleet, rule: str):
    for found in fleet.run(2, other_steps, rule):
        assert found["equal"]
        assert found["waits"] == []
        assert "set it to None" not in found["before"]
        assert "set it to None" in found["plan"]


# -- chosen by measurement ----------------------------------------------------------------------


def measured(world: World) -> dict[str, Any]:
    """A large layer and small batches: where a gradient takes longer than its rows, whatever the link."""
    torch.manual_seed(0)
    with device() as (gpu, group):
        model = nn.Sequential(nn.Linear(1500, 1500), nn.Tanh(), nn.Linear(1500, 4))
        ddp = DistributedDataParallel(model, process_group=group, init_sync=False, gradient_as_bucket_view=True)
        comm = commlib.attach(ddp)
        hooked = bool(ddp._comm_hooks)
        steps = 0
        while steps < 8 or (steps < 200 and not comm.settled):
            step(ddp, torch.randn(2, 1500, generator=torch.Generator().manual_seed(10 * steps + world.rank)))
            steps += 1
        gpu.wait(torch.device("cpu"))
        grads = [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        found = {"plan": str(comm.plan), "settled": comm.settled, "hooked": hooked, "steps": steps}
        found["routes"] = {p.spec.name: p.route.exchange for p in comm.plan}
        comm.close()
    return found | {"equal": all(same_everywhere(world, g) for g in grads)}


def test_the_default_measures_and_settles_by_moments_of_the_stream(fleet: Fleet) -> None:
    found = fleet.run(2, measured)
    for one in found:
        assert not one["hooked"]
        assert one["settled"], one["plan"]
        assert one["equal"]
        assert one["routes"] == found[0]["routes"]
