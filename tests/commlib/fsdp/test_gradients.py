"""What FSDP2 hands over, layer by layer: which values are whose, and what earlier steps have held back of them."""

from __future__ import annotations

import types

import torch
from torch import Tensor

from commlib.codecs.base import LayerSpec, Slot
from commlib.codecs.memory_store import MemoryStore
from commlib.exchange.step_commit import StepCommit
from commlib.fsdp.gradients import GradientReducer
from commlib.fsdp.param_groups import ParamGroup
from commlib.fsdp.plan import Replicas, plan_of
from commlib.groups.world import World
from commlib.telemetry.stats import Meter

CPU = torch.device("cpu")
SPECS = {"a.weight": LayerSpec("a.weight", (5, 8)), "b.weight": LayerSpec("b.weight", (4, 8))}
UNIT = ParamGroup("the root", types.SimpleNamespace(device=CPU), None, list(SPECS), SPECS, present=list(SPECS))


def sorter(rule: str, shard: World, store: MemoryStore, replicas: Replicas | None = None) -> GradientReducer:
    plan = plan_of(list(SPECS.values()), rule, world=shard.size, min_size=0, replicas=replicas)
    meters = {name: Meter(CPU) for name in SPECS}
    return GradientReducer(plan, shard, store, StepCommit(store), meters, dense_steps=0, seed=0)


def mesh(rank: int) -> tuple[World, Replicas]:
    """Two shards in each of two replicas; a rank of the first."""
    shard = World(rank, 2)
    return shard, Replicas.of(shard, World(0, 2))


def laid_out(a: Tensor, b: Tensor) -> Tensor:
    """Both layers, whole, as two owners get them: 3 rows of a and 2 of b; the rest."""
    table = torch.zeros(2, 40)
    table[0] = torch.cat([a[:3].flatten(), b[:2].flatten()])
    table[1] = torch.cat([a[3:].flatten(), torch.zeros(8), b[2:].flatten()])  # one row of a pads
    return table


def test_what_earlier_routes_have_held_back_is_added_where_the_owners_of_its_rows_get_it() -> None:
    gen = torch.Generator().manual_seed(0)
    a, b, late = (torch.randn(n, 8, generator=gen) for n in (5, 4, 5))
    store, table = MemoryStore(), laid_out(a, b)
    store.restore("a.weight", "residual", Slot((5, 8)), late)
    sorter("none", World(0, 2), store).for_owners(UNIT, table)
    assert torch.equal(table, laid_out(a + late, b))


def test_each_rank_finds_its_rows_of_every_layer_behind_what_pads_those_before() -> None:
    a, b = torch.arange(40.0).view(5, 8), 100 + torch.arange(32.0).view(4, 8)
    for rank, rows in enumerate([(a[:3], b[:2]), (a[3:], b[2:])]):
        shard, replicas = mesh(rank)
        found = sorter("onebit", shard, MemoryStore(), replicas).for_replicas(UNIT, laid_out(a, b)[rank], replicas)
        grads = [item.grad for items in found.values() for item in items]
        assert all(torch.equal(grad, mine) for grad, mine in zip(grads, rows, strict=True))


def test_between_replicas_a_route_takes_its_own_residual_over_and_it_is_not_added_to_the_gradient_too() -> None:
    shard, replicas = mesh(0)
    store, flat = MemoryStore(), torch.zeros(40)
    sorts = sorter("onebit", shard, store, replicas)
    for before in (0.0, 1.0):
        items = [item for found in sorts.for_replicas(UNIT, flat, replicas).values() for item in found]
        assert len(items) == 2
        for item in items:
            assert item.memory.old["residual"].unique().tolist() == [before]
            item.memory.new["residual"].fill_(before + 1)
        assert not flat.any()
        store.commit()
    assert [value.unique().tolist() for _, _, value in store.held()] == [[2.0], [2.0]]
