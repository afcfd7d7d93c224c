"""Trainings by NCCL's rules, on a simulated accelerator: streams order every use, and the host never waits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange.sequencer import Sequencer
from commlib.groups.world import World
from commlib.runtime.streams import Readback
from commlib.testing.accelerator import SimulatedAccelerator, SimulatedStream, StreamRace
from commlib.transports.process_group import algorithms
from commlib.transports.process_group.stream_ordered import NAME, CollectivesDiffer, OrderedWork, device
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import same_everywhere, step, torchrun

STEPS = 6
WARM = 3  # steps: DDP has rebuilt its buckets, and what is made once is made


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 5))


def nodes(world: World, local: int) -> contextlib.AbstractContextManager[None]:
    """Nodes of so many ranks; 0: of none is anything known."""
    return torchrun(world, local) if local else contextlib.nullcontext()


def trained(world: World, spec: str, local: int = 0, backend: str = NAME) -> dict[str, Any]:
    with nodes(world, local), device(backend) as (gpu, group):
        # views: DDP waits for its own works in C++, where the simulation does not see it, and would copy behind that
        options: dict[str, Any] = {"bucket_cap_mb": 0.01, "init_sync": False, "gradient_as_bucket_view": True}
        ddp = DistributedDataParallel(net(), process_group=group, **options)
        comm = commlib.attach(ddp, spec, hierarchy=bool(local) or None)
        waits: list[str] = []
        for i in range(STEPS):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * i + world.rank))
            gpu.waits.clear()
            step(ddp, x)
            waits += gpu.waits if i >= WARM else []
        gpu.wait(torch.device("cpu"))
        stats, hooked = comm.stats(), bool(ddp._comm_hooks)
        values = [p.detach().clone() for p in ddp.parameters()]
        comm.close()
    found = {"waits": waits, "steps": stats.steps, "hooked": hooked, "issued": len(getattr(group, "issued", ()))}
    return found | {"equal": all(same_everywhere(world, v) for v in values), "values": values}


def over_gloo(world: World, spec: str, local: int = 0) -> list[Tensor]:
    with nodes(world, local), mock.patch.dict(os.environ, {"COMMLIB_KERNELS": "reference"}):
        ddp = DistributedDataParallel(net(), bucket_cap_mb=0.01, init_sync=False)
        comm = commlib.attach(ddp, spec, hierarchy=bool(local) or None)
        for i in range(STEPS):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * i + world.rank))
            step(ddp, x)
        comm.close()
    return [p.detach().clone() for p in ddp.parameters()]


SPECS = (
    "none", "onebit", "powersgd:rank=2", "topk:ratio=0.1", "factors",
    *full("owners", "auto", "fp16", "bf16", "int8", "int4", "sign", "qsgd", "ternary", "natural", "randomk:ratio=0.1",
          "dgc:ratio=0.1", "twobit", "dct", "int8@scatter_gather", "onebit@scatter_gather", "topk:ratio=0.1,chunk=64"),
)  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_no_race_no_wait_of_the_host_and_the_weights_that_gloo_leaves(fleet: Fleet, spec: str) -> None:
    found = fleet.run(2, trained, spec)
    plain = fleet.run(2, over_gloo, spec)
    for one, values in zip(found, plain, strict=True):
        assert one["waits"] == []
        assert one["steps"] == STEPS
        assert one["hooked"] == (spec not in ("none", "auto"))
        assert one["equal"]
        assert one["issued"] > 0
        assert all(torch.equal(a, b) for a, b in zip(one["values"], values, strict=True))


@pytest.mark.parametrize("spec", ["onebit", *full("none", "int8@scatter_gather", "topk:ratio=0.1")])
def test_under_a_hierarchy_too(fleet: Fleet, spec: str) -> None:
    found = fleet.run(4, trained, spec, 2)
    plain = fleet.run(4, over_gloo, spec, 2)
    for one, values in zip(found, plain, strict=True):
        assert one["waits"] == []
        assert one["steps"] == STEPS
        assert one["hooked"]
        assert one["equal"]
        assert all(torch.equal(a, b) for a, b in zip(one["values"], values, strict=True))


SCHEDULES = {path.name for path in Path(algorithms.__path__[0]).glob("*.py")}
"""Files whose own room in the host's memory is taken for a device's."""


@pytest.mark.parametrize("spec", ["onebit", *full("none", "auto", "int8@scatter_gather", "factors", "owners")])
def test_over_zmq_tensors_are_staged_in_the_host_s_memory_in_order(fleet: Fleet, spec: str) -> None:
    found = fleet.run(2, trained, spec, 0, "zmq")
    plain = fleet.run(2, over_gloo, spec)
    for one, values in zip(found, plain, strict=True):
        assert [why for why in one["waits"] if why.rpartition(" at ")[2].partition(":")[0] not in SCHEDULES] == []
        assert one["equal"]
        assert all(torch.equal(a, b) for a, b in zip(one["values"], values, strict=True))


# -- what happens besides steps -----------------------------------------------------------------


def _losses_are_scaled(ddp: DistributedDataParallel, comm: commlib.HookState, gpu: SimulatedAccelerator) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    comm.detach()
    commlib.attach(ddp, "onebit", scaler=scaler)
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(ddp(_batch(i)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()


def _routes_change(ddp: DistributedDataParallel, comm: commlib.HookState, gpu: SimulatedAccelerator) -> None:
    for spec in ("int8", "powersgd:rank=2", "none", "onebit@scatter_gather"):
        comm.swap(spec)
        for i in range(2):
            step(ddp, _batch(i))
    comm.detach()
    step(ddp, _batch(9))


def _a_step_is_not_finite(ddp: DistributedDataParallel, comm: commlib.HookState, gpu: SimulatedAccelerator) -> None:
    before = comm.stats().skipped
    x = _batch(0)
    x[0, 0] = torch.nan
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    ddp.zero_grad()
    step(ddp, _batch(1))
    assert comm.stats().skipped == before + 1


def _gradients_add_up(ddp: DistributedDataParallel, comm: commlib.HookState, gpu: SimulatedAccelerator) -> None:
    for i in range(3):
        with ddp.no_sync():
            ddp(_batch(i)).square().mean().backward()
        ddp(_batch(i + 5)).square().mean().backward()
        ddp.zero_grad()


def _a_state_is_saved_and_loaded(
    ddp: DistributedDataParallel, comm: commlib.HookState, gpu: SimulatedAccelerator
) -> None:
    state = comm.state_dict()
    step(ddp, _batch(1))
    comm.load_state_dict(state)
    step(ddp, _batch(2))


def _batch(i: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))


STORIES = {
    story.__name__.strip("_").replace("_", " "): story
    for story in (
        _losses_are_scaled, _routes_change, _a_step_is_not_finite, _gradients_add_up, _a_state_is_saved_and_loaded
    )
}  # fmt: skip


def happened(world: World, story: str) -> bool:
    with device() as (gpu, group):
        ddp = DistributedDataParallel(
            net(), process_group=group, bucket_cap_mb=0.01, init_sync=False, gradient_as_bucket_view=True
        )
        comm = commlib.attach(ddp, "onebit")
        for i in range(2):
            step(ddp, _batch(i))
        STORIES[story](ddp, comm, gpu)
        gpu.wait(torch.device("cpu"))
        values = [p.detach().clone() for p in ddp.parameters()]
        comm.close()
    return all(same_everywhere(world, v) for v in values)


@pytest.mark.parametrize("story", STORIES)
def test_streams_order_what_happens_besides_steps(fleet: Fleet, story: str) -> None:
    assert fleet.run(2, happened, story) == [True, True]


# -- without DDP --------------------------------------------------------------------------------


def _sharded(model: nn.Module, optimizer: torch.optim.Optimizer, spec: str, group: Any) -> Any:
    return commlib.ShardedStep(model, optimizer, spec, process_group=group)


def _local(model: nn.Module, optimizer: torch.optim.Optimizer, spec: str, group: Any) -> Any:
    return commlib.LocalSteps(model, "diloco", spec, tau=2, optimizer=optimizer, process_group=group)


def without_ddp(world: World, make: Callable[..., Any], spec: str) -> tuple[bool, list[list[str]]]:
    """Whether replicas are equal; and why the host has waited, in the last two steps."""
    with device() as (gpu, group):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        made = make(model, optimizer, spec, group)
        waits = []
        for i in range(6):  # the last one is a meeting, if there are meetings
            gpu.waits.clear()
            model.zero_grad()
            model(_batch(i)).square().mean().backward()
            if make is _local:
                optimizer.step()
            made.step()
            waits.append(list(gpu.waits))
        gpu.wait(torch.device("cpu"))
        values = [p.detach().clone() for p in model.parameters()]
        made.close()
    return all(same_everywhere(world, v) for v in values), waits[-2:]


@pytest.mark.parametrize("spec", ["int8", *full("none", "onebit")])
@pytest.mark.parametrize(("make", "waits"), [(_sharded, [1, 1]), (_local, [0, 1])])
def test_the_host_waits_once_where_a_step_or_a_meeting_must_be_known_to_count(
    fleet: Fleet, make: Callable[..., Any], waits: list[int], spec: str
) -> None:
    """Both return whether it did."""
    for equal, found in fleet.run(2, without_ddp, make, spec):
        assert equal
        assert [len(each) for each in found] == waits, found


# -- what is left out is found ------------------------------------------------------------------


def _side_streams_do_not_wait(
    self: SimulatedStream, other: SimulatedStream, waits: Callable[..., None] = SimulatedStream.wait_stream
) -> None:
    if "communicator" in self.name:
        waits(self, other)


def _no_wait(self: OrderedWork, *_: object) -> bool:
    return True


def _nothing(*_: object) -> None:
    pass


def _at_once(self: Readback) -> list[float]:
    return [] if self._host is None else self._host.view(-1).tolist()


FAULTS: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "the exchange's stream does not wait for the gradients": (
        SimulatedStream, "wait_stream", _side_streams_do_not_wait, "is not behind default stream",
    ),
    "what was received is decoded before it has come": (OrderedWork, "wait", _no_wait, "is not behind communicator"),
    "gradients are used before they are exchanged": (SimulatedAccelerator, "joined", _nothing, "on default stream"),
    "a bucket's range is read before its copy is done": (Readback, "get", _at_once, "on the host"),
}  # fmt: skip
"""What is left out, by what stands in its place; and a part of what is said."""


def raced(world: World, fault: str) -> str:
    owner, name, wrong, _ = FAULTS[fault]
    with mock.patch.object(owner, name, wrong):
        try:
            trained(world, "onebit")
        except StreamRace as e:
            return str(e)
    return "nothing"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_order_of_streams_is_found(fleet: Fleet, fault: str) -> None:
    for said in fleet.run(2, raced, fault):
        assert FAULTS[fault][3] in said


def submitted(world: World, keeps: bool) -> str:
    """A bucket is given away while its exchange is under way."""
    with device() as (_, group), contextlib.ExitStack() as faults:
        if not keeps:
            faults.enter_context(mock.patch.object(SimulatedAccelerator, "keep", _nothing))
        sequencer = Sequencer([{"world": group}], lambda what, error: error, inline=True)
        try:
            for _ in range(3):
                bucket = torch.ones(100)
                sequencer.submit("bucket", _halved(bucket), bucket)
                del bucket
                torch.zeros(1)
        except StreamRace as e:
            return str(e)
    return "nothing"


def _halved(bucket: Tensor) -> Any:
    bucket.mul_(0.5)
    yield []


@pytest.mark.parametrize("keeps", [True, False])
def test_a_bucket_that_is_freed_meanwhile_is_recorded_on_the_exchanges_stream(fleet: Fleet, keeps: bool) -> None:
    for said in fleet.run(2, submitted, keeps):
        assert (said == "nothing") if keeps else "record_stream" in said


# -- one communicator, one order ----------------------------------------------------------------


def unlike(world: World, kind: str) -> str:
    with device() as (_, group):
        try:
            if kind == "lengths":
                group.allreduce([torch.zeros(5 + world.rank)])
            elif (world.rank == 0) == (kind == "order"):
                group.allreduce([torch.zeros(3)])
                group._allgather_base(torch.zeros(6), torch.zeros(3))
            else:
                group._allgather_base(torch.zeros(6), torch.zeros(3))
                group.allreduce([torch.zeros(3)])
        except CollectivesDiffer as e:
            return str(e)
    return "nothing"


@pytest.mark.parametrize("kind", ["lengths", "order"])
def test_ranks_that_issue_other_collectives_are_told_which(fleet: Fleet, kind: str) -> None:
    for rank, said in enumerate(fleet.run(2, unlike, kind)):
        assert f"rank {rank} of 2 has issued" in said
        assert "rank 0: " in said
        assert "rank 1: " in said
        assert "hang" in said
