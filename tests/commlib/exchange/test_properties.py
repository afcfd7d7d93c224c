"""Every exchange with every codec it takes, all ranks in one process, over random shapes and world sizes."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.codecs.base import LayerSpec, Seeds
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import compressors, make
from commlib.codecs.slots import Memory
from commlib.exchange.layer_task import LayerTask
from commlib.exchange.registry import EXCHANGES
from commlib.exchange.scatter_gather import stripes
from commlib.groups.world import World
from commlib.planning.route import Route
from commlib.planning.simulate import exchange_once, run
from commlib.telemetry.stats import Meter
from tests.support.tiers import examples, full

BLOCKS = "blocks:keep=0.3,staleness=4,block=16"  # several to a layer
MOMENTUM_FREE = {"dgc": "dgc:ratio=0.05,momentum=0", "topk": "topk:ratio=0.05", "randomk": "randomk:ratio=0.05"}
SPECS = [{**MOMENTUM_FREE, "blocks": BLOCKS}.get(name, name) for name in compressors()]
PAIRS = [
    f"{spec}@{exchange}"
    for spec in SPECS
    for exchange in EXCHANGES
    if Route(exchange, make(spec)).refuse(LayerSpec("x", (64, 64))) is None
]
OF_SMALL = ("onebit@gather", "onebit@scatter_gather", "powersgd@low_rank", "none@dense")
worlds = st.integers(1, 5)
shapes = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 700)),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)),
)


def gradients(world: int, shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=gen) for _ in range(world)]


def pending(stores: list[MemoryStore], shape: tuple[int, ...]) -> torch.Tensor:
    """(1/P)·Σ residuals and the owners' stripes: what is still owed to the mean gradient."""
    total = torch.zeros(shape, dtype=torch.float64)
    for store in stores:
        slots: dict[str, Any] = store.export().get("layer", {})
        if "residual" in slots:
            total += slots["residual"]["value"] / len(stores)
        if "owner.residual" in slots:
            start, value = slots["owner.residual"]["start"], slots["owner.residual"]["value"]
            total[start : start + len(value)] += value
    return total


def test_the_pairs_are_those_that_architecture_names():
    assert len(PAIRS) == 4 + len(SPECS) + (len(SPECS) - 3) + 3  # 4 are summed; three keep more than a residual
    assert {p for p in PAIRS if p.endswith("@push_pull")} == {"none@push_pull"}
    assert {p for p in PAIRS if p.endswith("@low_rank")} == {"powersgd@low_rank"}
    assert {p for p in PAIRS if p.endswith("@blocks")} == {f"{BLOCKS}@blocks"}


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=examples(15))
@given(world=worlds, shape=shapes, seed=st.integers(0, 99))
def test_all_ranks_end_with_the_same_bytes(pair, world, shape, seed):
    results = exchange_once(_route(pair), gradients(world, shape, seed))
    assert all(torch.equal(results[0], r) for r in results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize(
    "pair", [p for p in PAIRS if "residual" in make(p.split("@")[0]).slots(LayerSpec("x", (8, 8)))]
)
@settings(max_examples=examples(8))
@given(world=worlds, shape=shapes, seed=st.integers(0, 99))
def test_what_was_sent_and_what_is_pending_add_up_to_all_gradients(pair, world, shape, seed):
    stores = [MemoryStore() for _ in range(world)]
    sent = torch.zeros(shape, dtype=torch.float64)
    produced = torch.zeros(shape, dtype=torch.float64)
    for step in range(6):
        grads = gradients(world, shape, seed + 1000 * step)
        produced += sum(g.double() for g in grads) / world
        sent += exchange_once(_route(pair), grads, stores=stores, step=step)[0].double()
    error = (sent + pending(stores, shape) - produced).abs().max().item()
    # a 16-bit all-reduce adds in 16 bits, which no residual sees
    tolerance = {"fp16@dense": 2e-2, "bf16@dense": 2e-1}.get(pair, 5e-5)
    assert error < tolerance


@pytest.mark.parametrize("pair", ["none@dense", "none@gather", "none@scatter_gather", "none@push_pull"])
@given(world=worlds, shape=shapes, seed=st.integers(0, 99))
def test_the_identity_gives_the_mean(pair, world, shape, seed):
    grads = gradients(world, shape, seed)
    torch.testing.assert_close(exchange_once(pair, grads)[0], torch.stack(grads).mean(0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [-1, *full(0, 17)])
def test_a_non_finite_value_on_one_rank_reaches_every_rank(pair, bad, where):
    grads = gradients(3, (12, 30), 5)
    grads[1].view(-1)[where] = bad
    for result in exchange_once(_route(pair), grads):
        assert not result.isfinite().all()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_other_dtypes_come_back_in_their_own(pair, dtype):
    grads = [g.to(dtype) for g in gradients(2, (8, 40), 3)]
    results = exchange_once(_route(pair), grads)
    assert results[0].dtype == dtype
    assert torch.equal(results[0], results[1])


@given(world=worlds, rows=st.integers(0, 50), columns=st.integers(1, 50), spec=st.sampled_from(["none", "onebit"]))
def test_stripes_cover_a_layer_once_in_rank_order_and_at_the_codecs_boundaries(world, rows, columns, spec):
    codec, layer = make(spec), LayerSpec("x", (rows, columns))
    cut = stripes(codec, layer, world)
    assert len(cut) == world
    assert cut[0].start == 0
    assert cut[-1].stop == rows
    for a, b in pairwise(cut):
        assert a.stop == b.start
        assert a.stop % codec.stripe_rows(layer) == 0 or a.stop == rows
    units = [-(-(s.stop - s.start) // codec.stripe_rows(layer)) for s in cut]
    assert max(units) - min(units) <= 1
    assert units == sorted(units, reverse=True)


def test_one_bit_bytes_by_scatter_gather_are_two_payloads_times_p_minus_one_over_p():
    codec, layer = make("onebit"), LayerSpec("x", (1024, 512))
    sent = EXCHANGES["scatter_gather"].wire_bytes(codec, layer, 8)
    assert sent == pytest.approx(2 * 7 / 8 * (1024 * 512 / 8 + 8 * 1024))


def test_ranks_that_ask_for_different_collectives_are_refused_by_the_simulation():
    a, b = gradients(2, (8, 8), 0)
    routes = [Route("dense", make("none")), Route("gather", make("none"))]
    trips = []
    for rank, (grad, route) in enumerate(zip((a, b), routes, strict=True)):
        spec = LayerSpec.of(grad, "x")
        item = LayerTask(spec, route.codec, grad, Memory({}, {}), Seeds(0, 0, "x"), Meter(grad.device), Memory({}, {}))
        trips.append(EXCHANGES[route.exchange].rounds([item], World(rank, 2), None))
    with pytest.raises(ValueError, match="a real group would hang"):
        run(trips)


def tasks(pair: str, layers: int, world: World) -> list[LayerTask]:
    """Layers of 48 × 8 values, each with memory of its own."""
    route, store, found = _route(pair), MemoryStore(), []
    for i in range(layers):
        spec = LayerSpec(f"layer {i}", (48, 8))
        stripe, memory = route.carrier().owned(route.codec, spec, world), store.memory(spec, route.codec.slots(spec))
        owner = Memory({}, {})
        if stripe is not None:
            owner = store.owner(spec, route.codec.slots(stripe.spec), stripe.start)
        seeds, meter = Seeds(0, 0, spec.name), Meter(spec.device)
        found.append(LayerTask(spec, route.codec, torch.ones(spec.shape), memory, seeds, meter, owner))
    return found


def instructions(pair: str, layers: int) -> int:
    """Instructions of Python that an exchange of so many layers takes, on both of two ranks."""
    ranks = [World(rank, 2) for rank in range(2)]
    route, items, count = _route(pair), [tasks(pair, layers, world) for world in ranks], 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run([EXCHANGES[route.exchange].rounds(own, world, None) for own, world in zip(items, ranks, strict=True)])
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("pair", [*OF_SMALL, *full(*(p for p in PAIRS if p not in OF_SMALL))])
def test_an_exchange_takes_no_more_python_for_a_layer_the_more_there_are(pair: str) -> None:
    instructions(pair, 2)  # what is made or compiled once
    few, some, many = (instructions(pair, n) for n in (2, 18, 34))
    assert many - some <= 1.05 * (some - few)


def _route(pair: str) -> Route:
    """Past the check of a plain rule, which asks a 64 x 64 layer."""
    spec, _, exchange = pair.partition("@")
    return Route(exchange, make(spec))
