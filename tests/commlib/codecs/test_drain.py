"""Gradient that one route has held back goes out by the next one, whatever that is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.base import LayerSpec, Slot
from commlib.codecs.memory_store import MemoryStore
from commlib.planning.simulate import exchange_once

ROUTES = (
    "none",
    "onebit@gather",
    "onebit@scatter_gather",
    "onebit:axis=tensor@scatter_gather",
    "topk:ratio=0.2@gather",
    "int8:ef=on@scatter_gather",
    "powersgd:rank=1@low_rank",
)
SPEC = LayerSpec("layer", (4, 3))
RESIDUAL = {"residual": Slot((4, 3))}


def gradients(world: int, step: int, shape: tuple[int, ...]) -> list[Tensor]:
    gen = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=gen) for _ in range(world)]


def held(stores: list[MemoryStore]) -> int:
    """Slots of pending gradient that hold any."""
    return sum(e["role"] == "pending" for s in stores for layer in s.export().values() for e in layer.values())


@given(
    world=st.integers(2, 4),
    routes=st.lists(st.sampled_from(ROUTES), min_size=1, max_size=6),
    rows=st.integers(3, 9),
)
def test_whatever_the_routes_were_all_has_been_sent_after_a_dense_step(world: int, routes: list[str], rows: int):
    stores = [MemoryStore() for _ in range(world)]
    sent, produced = torch.zeros(rows, 8), torch.zeros(rows, 8)
    for step, route in enumerate([*routes, "none"]):
        grads = gradients(world, step, (rows, 8))
        produced += torch.stack(grads).mean(0)
        results = exchange_once(route, grads, stores=stores, step=step)
        assert all(torch.equal(r, results[0]) for r in results)
        sent += results[0]
    torch.testing.assert_close(sent, produced, atol=1e-4, rtol=1e-4)
    assert held(stores) == 0


def test_a_route_with_a_residual_of_its_own_takes_it_over_and_drains_nothing():
    stores = [MemoryStore(), MemoryStore()]
    exchange_once("topk:ratio=0.1@gather", gradients(2, 0, (6, 4)), stores=stores)
    before = stores[0].export()["layer"]["residual"]["value"]
    exchange_once("onebit@gather", [torch.zeros(6, 4)] * 2, stores=stores)
    assert isinstance(before, Tensor)
    assert before.abs().max() > 0
    assert held(stores) == 2


def writing(store: MemoryStore, value: float) -> None:
    """A step of a codec that holds back so much of everything."""
    store.memory(SPEC, RESIDUAL).new["residual"].fill_(value)


def drained(store: MemoryStore) -> float:
    """What a step of a codec without memory finds; it is neither committed nor discarded yet."""
    grad = torch.zeros(12)
    store.memory(SPEC, {})
    assert store.drain(SPEC, grad, 2, 2) is bool(grad.any())
    assert grad.unique().numel() == 1
    return float(grad[0])


@pytest.mark.parametrize("how", ["discarded", "undone"])
def test_a_step_that_does_not_count_has_drained_nothing(how: str):
    store = MemoryStore()
    writing(store, 3.0)
    store.commit()
    assert drained(store) == 3.0
    if how == "discarded":
        store.discard()
    else:
        store.commit()
        store.undo()
    assert drained(store) == 3.0
    store.commit()
    assert drained(store) == 0.0


def test_what_is_drained_follows_the_loss_scale():
    store = MemoryStore()
    writing(store, 3.0)
    store.commit()
    store.rescale(8.0)
    assert drained(store) == 24.0


def test_a_stripe_counts_as_often_as_there_are_ranks():
    store = MemoryStore()
    store.memory(SPEC, {})
    store.owner(SPEC, {"residual": Slot((2, 3))}, 1).new["residual"].fill_(5.0)
    store.commit()
    grad = torch.zeros(4, 3)
    store.memory(SPEC, {})
    store.drain(SPEC, grad, 2, 2)
    assert grad[:, 0].tolist() == [0.0, 10.0, 10.0, 0.0]


def test_a_stripe_cut_elsewhere_is_drained_and_not_taken_for_the_new_one():
    store = MemoryStore()
    store.owner(SPEC, {"residual": Slot((2, 3))}, 0).new["residual"].fill_(1.0)
    store.commit()
    grad = torch.zeros(4, 3)
    fresh = store.owner(SPEC, {"residual": Slot((2, 3))}, 2)
    assert not fresh.old["residual"].any()
    fresh.new["residual"].fill_(7.0)
    store.drain(SPEC, grad, 2, 2)
    store.commit()
    assert grad[:, 0].tolist() == [2.0, 2.0, 0.0, 0.0]
    assert store.owner(SPEC, {"residual": Slot((2, 3))}, 2).old["residual"].unique().tolist() == [7.0]


def test_memory_of_what_was_drained_is_given_back():
    store = MemoryStore()
    writing(store, 1.0)
    store.commit()
    drained(store)
    store.commit()
    store.memory(SPEC, {})
    assert not store._pairs["layer"]
