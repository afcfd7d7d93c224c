"""Blocks that all ranks choose alike, all ranks in one process."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import make
from commlib.exchange.registry import EXCHANGES
from commlib.planning.route import resolve
from commlib.planning.simulate import exchange_once
from commlib.runtime.layers import LayerSpec
from tests.support.tiers import examples

ORDERS = ("magnitude", "fifo", "random")


def rule(order: str) -> str:
    return f"blocks:keep=0.1,staleness=7,order={order},block=16"


def held(store: MemoryStore, slot: str) -> torch.Tensor:
    value = store.export()["layer"][slot]["value"]
    assert isinstance(value, torch.Tensor)
    return value


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=examples(12))
@given(world=st.sampled_from([1, 2, 4]), n=st.integers(20, 500), seed=st.integers(0, 99))
def test_sent_and_held_are_what_was_produced_exactly(order, world, n, seed):
    stores = [MemoryStore() for _ in range(world)]
    gen = torch.Generator().manual_seed(seed)
    produced, sent = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(20):
        grads = [torch.randint(-64, 64, (n,), generator=gen).float() for _ in range(world)]
        produced += torch.stack(grads).double().sum(0)
        means = exchange_once(rule(order), grads, stores=stores, step=step)
        assert all(torch.equal(m, means[0]) for m in means)
        assert all(torch.equal(held(s, "ages"), held(stores[0], "ages")) for s in stores)
        sent += world * means[0].double()
        owed = sum(held(s, "residual").double() for s in stores)
        assert torch.equal(sent + owed, produced)  # whole numbers, and P a power of two: nothing rounds


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_rank_holds_leaves_within_the_bound(order: str) -> None:
    stores = [MemoryStore() for _ in range(3)]
    mark = torch.ones(400)
    got = exchange_once(rule(order), [mark, mark * 0, mark * 0], stores=stores)[0]
    for step in range(1, 8):
        noise = [torch.zeros(400) for _ in stores]
        for n in noise:
            n[:64] = 1000.0 * step  # more important than what is marked, wherever it is
        got += exchange_once(rule(order), noise, stores=stores, step=step)[0]
    assert (got[64:] - 1 / 3).abs().max() < 1e-6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_heard_of_though_its_block_is_not_sent(order: str, bad: float) -> None:
    spec = LayerSpec("layer", (1600,))
    codec = make(rule(order))
    assert codec.nbytes(spec) < 4 * 1600 / 5  # most blocks stay
    for place in range(0, 1600, 160):
        grads = [torch.randn(1600, generator=torch.Generator().manual_seed(r)) for r in range(3)]
        grads[1][place] = bad
        for mean in exchange_once(rule(order), grads):
            assert not mean.isfinite().all()


def test_finite_gradients_of_any_size_stay_finite() -> None:
    for size in (1e-40, 1e20, 1e38):
        grads = [torch.full((200,), size), torch.full((200,), -size / 2)]
        assert all(m.isfinite().all() for m in exchange_once(rule("magnitude"), grads))


def test_bytes_are_one_value_a_block_and_the_blocks_that_go() -> None:
    spec = LayerSpec("layer", (64, 64))  # 256 blocks of 16, of which ⌈256/8⌉ = 32 go
    sent = EXCHANGES["blocks"].wire_bytes(make(rule("magnitude")), spec, 4)
    assert sent == pytest.approx(2 * 3 / 4 * 4 * (256 + 32 * 16))


def test_other_codecs_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match=r"onebit cannot go over blocks: it does not choose blocks"):
        resolve("onebit@blocks", 2)
    with pytest.raises(ValueError, match=r"keeps its own .*use gather"):
        resolve("blocks@scatter_gather", 2)
