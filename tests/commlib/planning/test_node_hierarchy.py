"""Asking for a hierarchy: what is flat, what does not fit, and that ranks which disagree all learn it at once."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer, same_everywhere, torchrun


def attached(world: World, hierarchy: Any, rule: Any = "none") -> str:
    """The plan, or the error, that this rank gets; it must come at once."""
    ddp = DistributedDataParallel(nn.Linear(32, 64))
    try:
        comm = commlib.attach(ddp, rule, hierarchy=hierarchy, timeout=600)  # the fleet does not wait for that
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    comm.close()
    return str(comm.plan)


def places(world: World, table: list[tuple[int, int, int]], rule: Any = "none") -> str:
    """As torchrun would say it with (GROUP_RANK, LOCAL_RANK, LOCAL_WORLD_SIZE) of each rank."""
    with torchrun(world, 1):
        names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        os.environ.update({k: str(v) for k, v in zip(names, table[world.rank], strict=True)})
        return attached(world, True, rule)


TWO_BY_TWO = [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
MIXED_UP = [(1, 1, 2), (0, 0, 2), (1, 0, 2), (0, 1, 2)]


@pytest.mark.parametrize("table", [TWO_BY_TWO, MIXED_UP])
def test_nodes_come_from_torchruns_environment_in_any_order_of_ranks(fleet: Fleet, table: list[tuple[int, int, int]]):
    for plan in fleet.run(4, places, table, "onebit@gather"):
        assert plan.startswith("dense inside a node of 2, routes between 2 nodes\n")
        assert "onebit@gather" in plan


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ([(0, r, 4) for r in range(4)], "hierarchy: flat: all ranks (4) are on one node"),
        ([(r, 0, 1) for r in range(4)], "hierarchy: flat: one rank on each of 4 nodes"),
    ],
)
def test_one_node_and_one_rank_a_node_go_flat_and_the_plan_says_why(fleet: Fleet, table: Any, why: str):
    for rule in ("none", "powersgd:rank=2", "auto"):  # what a hierarchy would refuse works there
        for plan in fleet.run(4, places, table, rule):
            assert why in plan.splitlines()[0]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            [(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 1)],
            "equally many ranks on each node, and there are 3 on node 0",
        ),
        ([(0, 0, 2), (0, 0, 2), (1, 0, 2), (1, 1, 2)], "ranks 0 and 1 both say LOCAL_RANK 0 on node 0"),
        ([(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4)], "node 0 has 2 of the ranks, and they say LOCAL_WORLD_SIZE 4"),
    ],
)
def test_an_environment_that_does_not_add_up_is_the_same_error_on_all_ranks(fleet: Fleet, table: Any, said: str):
    errors = fleet.run(4, places, table)
    assert len(set(errors)) == 1
    assert errors[0].startswith("ValueError: ")
    assert said in errors[0]


def without_torchrun(world: World, who: int) -> str:
    with torchrun(world, 2):
        if world.rank == who:
            del os.environ["GROUP_RANK"]
        try:
            return attached(world, True)
        finally:
            os.environ["GROUP_RANK"] = ""


def test_a_rank_without_torchruns_environment_says_so_and_the_others_learn_it(fleet: Fleet):
    errors = fleet.run(4, without_torchrun, 2)
    assert errors[2].startswith("ValueError: hierarchy=True needs GROUP_RANK, which torchrun sets")
    for rank in (0, 1, 3):
        assert errors[rank].startswith("PlanMismatch: rank 2 failed to attach")
        assert "GROUP_RANK" in errors[rank]


def meshed(world: World, table: Any, rule: Any = "none") -> str:
    return attached(world, DeviceMesh("cpu", torch.tensor(table), _init_backend=False), rule)


@pytest.mark.parametrize("table", [[[0, 1], [2, 3]], [[3, 0], [1, 2]]])
def test_nodes_come_from_a_mesh(fleet: Fleet, table: Any):
    for plan in fleet.run(4, meshed, table):
        assert plan.startswith("dense inside a node of 2, routes between 2 nodes\n")


@pytest.mark.parametrize("table", [[[0], [1], [2], [3]], [[0, 1, 2, 3]]])
def test_a_mesh_of_one_node_or_one_rank_a_node_goes_flat(fleet: Fleet, table: Any):
    for plan in fleet.run(4, meshed, table):
        assert plan.startswith("hierarchy: flat: ")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([0, 1, 2, 3], "a hierarchy's mesh has the dimensions (nodes, local), and this one has 1, of 4"),
        ([[[0, 1], [2, 3]]], "and this one has 3, of 1x2x2"),
        ([[0, 1]], "the mesh has ranks 0, 1, and the model is reduced over 0, 1, 2, 3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_an_error_that_says_how(fleet: Fleet, table: Any, said: str):
    for error in fleet.run(4, meshed, table):
        assert error.startswith("ValueError: ")
        assert said in error


def other(world: World, hierarchies: list[Any]) -> str:
    given = hierarchies[world.rank]
    if isinstance(given, list):
        return meshed(world, given)
    with torchrun(world, 2):
        return attached(world, given)


@pytest.mark.parametrize(
    ("hierarchies", "said"),
    [
        ([True, True, True, None], ["torchrun's", "none"]),
        ([None, None, True, None], ["torchrun's", "none"]),
        ([[[0, 1], [2, 3]]] * 3 + [[[0, 2], [1, 3]]], ["mesh 0,1 2,3", "mesh 0,2 1,3"]),
        ([True, True, True, [[0, 1], [2, 3]]], ["torchrun's", "mesh 0,1 2,3"]),
    ],
)
def test_ranks_that_disagree_about_the_hierarchy_all_raise_plan_mismatch(
    fleet: Fleet, hierarchies: Any, said: list[str]
):
    for error in fleet.run(4, other, hierarchies):
        assert error.startswith("PlanMismatch: ")
        assert all(text in error for text in said), error


@pytest.mark.parametrize("given", ["yes", 2, (2, 2)])
def test_something_else_is_a_type_error_that_names_what_works(fleet: Fleet, given: Any):
    for error in fleet.run(2, attached, given):
        assert error.startswith("TypeError: hierarchy must be None, True or a DeviceMesh of dimensions (nodes, local)")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("powersgd:rank=2", "weight by powersgd:rank=2@low_rank cannot be taken under a hierarchy"),
        ("powersgd:rank=2@gather", "its basis cannot be shared out by rows"),
    ],
)
def test_routes_that_need_whole_layers_are_refused_at_attach(fleet: Fleet, rule: str, said: str):
    for error in fleet.run(4, places, TWO_BY_TWO, rule):
        assert error.startswith("ValueError: ")
        assert said in error


def late(world: World) -> str:
    """Rank 3 never attaches."""
    if world.rank == 3:
        return ""
    with torchrun(world, 2):
        ddp = nn.Linear(4, 4)
        with pytest.raises(commlib.PeerLost) as caught:
            commlib.HookState(ddp, "none", hierarchy=True, timeout=10)
        return str(caught.value)


@pytest.mark.full
def test_a_rank_that_does_not_attach_is_named_after_the_time_out(fleet: Fleet):
    for text in fleet.run(4, late)[:3]:
        assert "rank 3 of 4 did not attach within 10 s" in text


def part_of_the_job(world: World) -> tuple[bool, str]:
    """Two models on two halves of the job, each on one of every node's two ranks: hierarchies of their own."""
    half = dist.new_group([r for r in range(8) if r % 4 < 2]), dist.new_group([r for r in range(8) if r % 4 >= 2])
    mine = half[world.rank % 4 >= 2]
    with torchrun(world, 4):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(32, 64), process_group=mine)
        comm = commlib.attach(ddp, "onebit@gather", hierarchy=True)
    ddp(torch.randn(4, 32, generator=torch.Generator().manual_seed(world.rank))).square().sum().backward()
    comm.close()
    grad = ddp.module.weight.grad
    others = [torch.empty_like(grad) for _ in range(4)]
    dist.all_gather(others, grad, group=mine)
    return all(torch.equal(grad, o) for o in others), comm.plan.about


@pytest.mark.full
def test_models_on_parts_of_the_job_have_hierarchies_of_their_own(fleet: Fleet):
    for equal, about in fleet.run(8, part_of_the_job):
        assert equal
        assert about == "dense inside a node of 2, routes between 2 nodes"


def pinned(world: World) -> tuple[str, bool]:
    with torchrun(world, 2):
        first = Trainer(world, "onebit@gather", hierarchy=True)
        second = Trainer(world, first.comm.plan, hierarchy=True)
    for t in (first, second):
        t.train(3)
        t.close()
    return str(second.comm.plan), torch.equal(first.weights(), second.weights()) and same_everywhere(
        world, second.weights()
    )


def test_a_plan_can_be_pinned_under_a_hierarchy(fleet: Fleet):
    for plan, same in fleet.run(4, pinned):
        assert same
        assert plan.startswith("pinned: dense inside a node of 2, routes between 2 nodes")
