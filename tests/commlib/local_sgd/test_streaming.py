"""Streaming, two levels, an optimizer that overflowed, and τ by measurement, between real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from commlib.groups.world import World
from commlib.local_sgd.local_steps import LocalSteps
from tests.support.rank_pool import Fleet

TAU, DELAY, MIX, RATE, STEPS = 6, 2, 0.25, 0.1, 20


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 5, generator=drawn).double(), torch.randn(8, 2, generator=drawn).double()


def descend(model: nn.Module, step: int, rank: int) -> None:
    x, y = batch(step, rank)
    gradients = torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.sub_(g, alpha=RATE)


def streamed(world: World) -> list[list[float]]:
    model = network(world.rank)
    local = LocalSteps(model, "average", tau=TAU, fragments=2, delay=DELAY, mix=MIX)
    for step in range(STEPS):
        descend(model, step, world.rank)
        local.step()
    return [p.detach().reshape(-1).tolist() for p in model.parameters()]


def streamed_in_one_process(size: int) -> list[list[list[float]]]:
    """The same as the paper writes it: what a fragment's mean was when it left is mixed in ``DELAY`` steps later."""
    models = [network(0) for _ in range(size)]
    halves = [slice(0, 2), slice(2, 4)]
    shared = [p.detach().clone() for p in models[0].parameters()]
    late: dict[int, tuple[slice, list[Tensor]]] = {}
    for step in range(STEPS):
        for rank, model in enumerate(models):
            descend(model, step, rank)
        own = [[p.data for p in model.parameters()] for model in models]
        if step in late:
            half, means = late.pop(step)
            shared[half] = means
            for values in own:
                for p, mean in zip(values[half], means, strict=True):
                    p.copy_(MIX * p + (1 - MIX) * mean)
        for f, half in enumerate(halves):
            if (step + 1) % TAU == (f + 1) * TAU // 2 % TAU:
                columns = zip(*(values[half] for values in own), strict=True)
                late[step + DELAY] = half, [torch.stack(c).mean(0) for c in columns]
    return [[p.detach().reshape(-1).tolist() for p in model.parameters()] for model in models]


@pytest.mark.parametrize("size", [2, 3])
def test_streaming_averages_are_those_of_a_serial_reference(fleet: Fleet, size: int) -> None:
    for rank, (found, expected) in enumerate(
        zip(fleet.run(size, streamed), streamed_in_one_process(size), strict=True)
    ):
        for a, b in zip(found, expected, strict=True):
            assert a == pytest.approx(b, abs=1e-12), rank


def under_ddp(world: World, rule: str) -> tuple[list[list[float]], int]:
    """Two nodes of two ranks: DDP inside, local steps between."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "local"))
    model = network(world.rank).float()
    local_group: Any = mesh.get_group("local")
    ddp = DistributedDataParallel(model, process_group=local_group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    local = LocalSteps(ddp, rule, "onebit", tau=3, hierarchy=mesh, min_size=8, optimizer=optimizer)
    for step in range(7):
        x, y = batch(step, world.rank)
        optimizer.zero_grad()
        (ddp(x.float()) - y.float()).square().mean().backward()
        optimizer.step()
        local.step()
    between = [p.detach().reshape(-1).tolist() for p in model.parameters()]
    local.close()
    return between, local._fragments[0]._ranks


@pytest.mark.parametrize("rule", ["bmuf", "elastic"])
def test_nodes_take_local_steps_and_their_ranks_stay_one_replica(fleet: Fleet, rule: str) -> None:
    found = fleet.run(4, under_ddp, rule)
    (a, count), (b, _), (c, _), (d, _) = found
    assert a == b  # a step after the last meeting: alike inside a node,
    assert c == d
    assert a != c  # and apart between them
    assert count == 2  # the rule counts nodes


def wrong_ddp(world: World) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "local"))
    with pytest.raises(ValueError, match="give it a process group") as e:
        LocalSteps(DistributedDataParallel(network(0)), hierarchy=mesh)
    return str(e.value)


def test_a_ddp_over_all_ranks_has_no_local_steps(fleet: Fleet) -> None:
    assert fleet.run(2, wrong_ddp) == ["a node has 1 rank(s), and DDP has 2: give it a process group of a node's"] * 2


def poisoned(world: World, fragments: int) -> tuple[int, bool, bool]:
    """One rank's gradient is not finite once; it had all of Adam's state not finite."""
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    local = LocalSteps(model, "average", tau=2 * fragments, fragments=fragments, optimizer=optimizer)
    for step in range(12):
        x, y = batch(step, world.rank)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean() * (float("nan") if (step, world.rank) == (1, 1) else 1.0)
        loss.backward()
        optimizer.step()
        local.step()
    finite = all(bool(v.isfinite().all()) for s in optimizer.state.values() for v in s.values())
    local.close()
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    every = [torch.empty_like(values) for _ in range(world.size)]
    dist.all_gather(every, values)
    return local.refused, finite and bool(values.isfinite().all()), all(torch.equal(v, values) for v in every)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_nan_in_one_ranks_optimizer_is_gone_after_one_refused_meeting(fleet: Fleet, fragments: int) -> None:
    assert fleet.run(2, poisoned, fragments) == [(1, True, True)] * 2


def measured(world: World) -> tuple[int, str, list[int]]:
    model = network(0)
    local = LocalSteps(model, "average", tau="auto:share=0.5,first=4,most=9")
    met = []
    for step in range(40):
        descend(model, step, world.rank)
        if local.step():
            met.append(step + 1)
    return local.tau, local.pace, met


def test_tau_by_measurement_is_the_same_on_all_ranks(fleet: Fleet) -> None:
    first, *others = fleet.run(3, measured)
    assert others == [first] * 2
    tau, said, met = first
    assert met[0] == 4
    assert 1 <= tau <= 9
    assert "times as fast as one" in said
