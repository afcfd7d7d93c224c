"""What of a state fits the plan here: it is taken over, left out, or refused with nothing changed. One rank, here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commlib.checkpoint import StateDict, from_state, to_state
from commlib.codecs.base import LayerSpec, Slot
from commlib.codecs.memory_store import MemoryStore
from commlib.errors import CheckpointMismatch
from commlib.groups.world import World
from commlib.planning.plan import Plan
from commlib.planning.planner import make_plan

SPECS = [LayerSpec("a.weight", (5, 8)), LayerSpec("b.weight", (6, 8))]
ME = World(1, 2)


def planned(rule: str, specs: list[LayerSpec] = SPECS) -> Plan:
    return make_plan(specs, rule, world=ME.size, min_size=0)


def saved(rule: str, key: str, slot: Slot, value: Tensor, start: int = 0) -> StateDict:
    """The state of a rank by such a plan, with one slot of a.weight."""
    store = MemoryStore()
    store.restore("a.weight", key, slot, value, start=start)
    return to_state(planned(rule), store, ME, 7)


def drained(store: MemoryStore, spec: LayerSpec) -> Tensor:
    """What a step without memory finds held back."""
    grad = torch.zeros(spec.shape)
    store.memory(spec, {})
    store.drain(spec, grad, 1, 1)
    store.discard()
    return grad


def test_after_a_change_of_routes_a_basis_is_left_out_that_the_routes_here_do_not_know() -> None:
    state = saved("powersgd:rank=1", "basis", Slot((8, 1), "replicated"), torch.ones(8, 1))
    store = MemoryStore()
    assert from_state(state, planned("none"), store, ME, drop_residuals=False) == 7
    assert store.empty


def test_by_the_same_routes_a_slot_that_these_do_not_know_is_damage() -> None:
    state = saved("none", "basis", Slot((8, 1), "replicated"), torch.ones(8, 1))
    with pytest.raises(CheckpointMismatch, match=r"slot 'basis' of 'a\.weight' of shape \(8, 1\) is unknown"):
        from_state(state, planned("none"), MemoryStore(), ME, drop_residuals=False)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_rows_that_another_route_held_back_are_taken_over_up_to_the_last_one(start: int) -> None:
    rows = torch.arange(16.0).view(2, 8) + 1
    store = MemoryStore()
    state = saved("onebit@scatter_gather", "owner.residual", Slot((2, 8)), rows, start)
    from_state(state, planned("none"), store, ME, drop_residuals=False)
    wanted = torch.zeros(5, 8)
    wanted[start : start + 2] = rows
    assert torch.equal(drained(store, SPECS[0]), wanted)


def test_rows_beyond_the_last_one_are_damage() -> None:
    state = saved("onebit@scatter_gather", "owner.residual", Slot((2, 8)), torch.ones(2, 8), 4)
    with pytest.raises(CheckpointMismatch, match=r"of shape \(2, 8\), and should be rows of \(5, 8\), from row 4"):
        from_state(state, planned("none"), MemoryStore(), ME, drop_residuals=False)


def test_a_state_that_is_refused_has_changed_nothing() -> None:
    """Gradient is held back of a layer that is sparse here."""
    state = saved("onebit", "residual", Slot((5, 8)), torch.ones(5, 8))
    plan = planned("none", [LayerSpec("a.weight", (5, 8), sparse=True), SPECS[1]])
    store = MemoryStore()
    store.restore("b.weight", "residual", Slot((6, 8)), torch.full((6, 8), 3.0))
    with pytest.raises(CheckpointMismatch, match=r"holds back gradient of a\.weight, which is sparse here"):
        from_state(state, plan, store, ME, drop_residuals=False)
    assert drained(store, SPECS[1]).unique().tolist() == [3.0]
