"""What routes hold from step to step: the plan says it before, and the attached model says it then."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import batch, model


def held(world: World, rule: str, nodes: int) -> tuple[commlib.HeldBytes, commlib.HeldBytes, int, str]:
    """Before the first step and after some; what the plan says, and how it ends."""
    ddp = DistributedDataParallel(model())
    mesh = init_device_mesh("cpu", (nodes, world.size // nodes)) if nodes > 1 else None
    comm = commlib.attach(ddp, rule, min_size=0, hierarchy=mesh)
    first = comm.memory()
    for step in range(3):
        x, y = batch(world, step)
        torch.nn.functional.cross_entropy(ddp(x), y).backward()
    found = first, comm.memory(), comm.plan.held_bytes, str(comm.plan).splitlines()[-1]
    assert comm.stats().memory == found[1]
    comm.close()
    return found


@pytest.mark.parametrize(
    ("size", "rule", "nodes"),
    [
        (2, "onebit@scatter_gather", 1),
        (2, "dgc:ratio=0.05", 1),
        (2, "fp16", 1),
        (2, "none", 1),
        *full(
            (2, "onebit:residual=bfloat16", 1),
            (2, "onebit:residual=int8", 1),
            (3, "int8:residual=int8@scatter_gather", 1),
            (2, "powersgd:rank=2,residual=int8", 1),
            (4, "int8:residual=int8", 2),
            (3, "int8@scatter_gather", 1),
            (3, "powersgd:rank=2", 1),
            (2, "topk:ratio=0.1", 1),
            (2, "blocks", 1),
            (2, "factors", 1),
            (4, "int8", 2),
        ),
    ],
)
def test_a_rank_holds_what_the_plan_says_and_room_to_work_in(fleet: Fleet, size: int, rule: str, nodes: int) -> None:
    ranks = fleet.run(size, held, rule, nodes)
    for first, after, most, said in ranks:
        assert first == commlib.HeldBytes(0, 0, 0)
        assert after.total == after.residuals + after.state + after.buffers
        assert after.residuals + after.state <= most
        assert (after.buffers > 0) == (rule not in ("none", "factors"))
        assert said.startswith(f"kept from step to step: {most:,} bytes a rank") == (most > 0)
    assert ranks[0][1].residuals + ranks[0][1].state == ranks[0][2]
