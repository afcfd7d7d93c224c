"""FSDP2 and HSDP by NCCL's rules, on a simulated accelerator: with FSDP2's own streams, and ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state

import commlib
from commlib.groups.world import World
from commlib.testing.accelerator import SimulatedAccelerator, SimulatedStream
from commlib.transports.process_group.stream_ordered import NAME, OrderedWork, device
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_fsdp import Network, batch

CPU = torch.device("cpu")
STEPS = 6
WARM = 3
SHAPE = 2, 2  # of HSDP: replicas, shards


class Streams:
    """Streams as FSDP2 asks the module of a device for them, ``torch.cuda`` for example."""

    def __init__(self, gpu: SimulatedAccelerator) -> None:
        self._gpu = gpu
        self.current_stream, self.stream, self.Event = gpu.current, gpu.use, gpu.event

    def Stream(self, priority: int = 0) -> SimulatedStream:
        """A new one."""
        return self._gpu.stream(CPU)


@contextlib.contextmanager
def streams_of(gpu: SimulatedAccelerator) -> Iterator[None]:
    """FSDP2 uses the simulated accelerator's streams."""
    handle = Streams(gpu)
    with contextlib.ExitStack() as patched:
        for module in (_fsdp_collectives, _fsdp_param_group, _fsdp_state):
            patched.enter_context(mock.patch.object(module, "_get_device_handle", return_value=handle))
        yield


def mesh_of(world: World, group: Any) -> DeviceMesh:
    """A mesh of stream-ordered communicators; of four ranks, with replicas."""
    if world.size < 4:
        return DeviceMesh.from_group(group, "cpu")
    ranks = torch.arange(4).view(SHAPE)
    made = [[dist.new_group(row, backend=NAME) for row in side.tolist()] for side in (ranks.t(), ranks)]
    across, along = made[0][world.rank % SHAPE[1]], made[1][world.rank // SHAPE[1]]
    return DeviceMesh.from_group([across, along], "cpu", mesh=ranks, mesh_dim_names=("replicas", "shards"))


def train(model: Any, world: World, each: Callable[[], None] = lambda: None) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for at in range(STEPS):
        each()
        x, y = batch(world.rank, at)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.to_local().detach().clone() for p in model.parameters() if p.grad is not None]


def sharded(mesh: DeviceMesh) -> Any:
    model: Any = Network()
    fully_shard(model.second, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def simulated(world: World, rule: str | None) -> dict[str, Any]:
    waits: list[list[str]] = []
    with device() as (gpu, group), streams_of(gpu):

        def each() -> None:
            waits.append(list(gpu.waits))
            gpu.waits.clear()

        model = sharded(mesh_of(world, group))
        comm = None if rule is None else commlib.attach(model, rule, min_size=0)
        values = train(model, world, each)
        each()
        gpu.wait(CPU)
        if comm is not None:
            comm.close()
    found = {"values": values, "waits": [w for each in waits[1 + WARM :] for w in each], "streams": len(gpu.streams)}
    return found | {"of each step": waits[1:]}


def over_gloo(world: World, rule: str | None) -> list[Tensor]:
    shape, names = ((world.size,), ("shards",)) if world.size < 4 else (SHAPE, ("replicas", "shards"))
    with mock.patch.dict(os.environ, {"COMMLIB_KERNELS": "reference"}):
        model = sharded(init_device_mesh("cpu", shape, mesh_dim_names=names))
        comm = None if rule is None else commlib.attach(model, rule, min_size=0)
        values = train(model, world)
        if comm is not None:
            comm.close()
    return values


RULES = ["int8", *full(None, "none", "bf16", "onebit", "topk:ratio=0.1")]


def alike(fleet: Fleet, ranks: int, rule: str | None) -> None:
    found, plain = fleet.run(ranks, simulated, rule), fleet.run(ranks, over_gloo, rule)
    for one, values in zip(found, plain, strict=True):
        assert one["waits"] == []
        assert one["streams"] > 4  # FSDP2's, the communicator's, the exchange's
        assert all(torch.equal(a, b) for a, b in zip(one["values"], values, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_no_race_no_wait_of_the_host_and_the_weights_that_gloo_leaves(fleet: Fleet, rule: str | None) -> None:
    alike(fleet, 2, rule)


@pytest.mark.parametrize("rule", full("none", "int8", "onebit"))
def test_nor_between_replicas(fleet: Fleet, rule: str) -> None:
    alike(fleet, 4, rule)


def test_codecs_that_are_chosen_by_measurement_take_over_without_a_race_and_only_a_review_waits(fleet: Fleet) -> None:
    """After five plain steps there is a review, and the sixth is by the first codec that is tried."""
    rule = "lossy:int8"
    found, plain = fleet.run(2, simulated, rule), fleet.run(2, over_gloo, rule)
    for one, values in zip(found, plain, strict=True):
        before, _, after = one["of each step"][WARM:]
        assert (before, after) == ([], [])
        assert all(torch.equal(a, b) for a, b in zip(one["values"], values, strict=True))


def _no_wait(self: OrderedWork, *_: object) -> bool:
    return True


def _nothing(*_: object) -> None:
    """It is left out."""


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "a unit's gradients are decoded before they have come": (OrderedWork, "wait", _no_wait),
    "a unit's mean is used before it is made": (SimulatedAccelerator, "joined", _nothing),
    "streams wait for no event": (SimulatedStream, "wait_event", _nothing),
    "streams do not wait for each other": (SimulatedStream, "wait_stream", _nothing),
}
"""What is left out, and by what it is replaced."""


def raced(world: World, fault: str) -> str:
    owner, name, wrong = FAULTS[fault]
    with mock.patch.object(owner, name, wrong):
        try:
            simulated(world, "int8")
        except (commlib.CommlibError, RuntimeError) as e:  # FSDP2's own collectives are told of as ours
            return f"{type(e).__name__}: {e}"
    return "nothing"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_order_of_streams_is_found(fleet: Fleet, fault: str) -> None:
    for said in fleet.run(2, raced, fault):
        assert "which is not behind" in said, said
