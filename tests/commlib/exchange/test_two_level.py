"""Two levels with every codec and exchange they take, all ranks in one process, over random shapes and nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.codecs.base import LayerSpec, Seeds
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import compressors, make
from commlib.codecs.slots import Memory
from commlib.exchange import two_level
from commlib.exchange.collectives import AllReduce, Among, scope_of
from commlib.exchange.hierarchy import Hierarchy, refuse
from commlib.exchange.lanes import scopes
from commlib.exchange.layer_task import LayerTask
from commlib.groups.world import World
from commlib.planning.route import Route
from commlib.planning.simulate import exchange_once, run
from commlib.telemetry.stats import Meter
from tests.support.tiers import examples, full

MOMENTUM_FREE = {"dgc": "dgc:ratio=0.05,momentum=0", "topk": "topk:ratio=0.05", "randomk": "randomk:ratio=0.05"}
ROUTES = [
    (spec, Route(exchange, make(spec)))
    for spec in (MOMENTUM_FREE.get(name, name) for name in compressors())
    for exchange in ("dense", "gather", "scatter_gather")
]
LAYER = LayerSpec("x", (64, 64))
PAIRS = [f"{spec}@{r.exchange}" for spec, r in ROUTES if r.refuse(LAYER) is None and refuse(r, LAYER) is None]
FEEDBACK = [p for p in PAIRS if "residual" in make(p.split("@")[0]).slots(LAYER)]
nodes = st.integers(1, 4)
local = st.integers(2, 4)
shapes = st.one_of(
    st.tuples(st.integers(0, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 3)),  # fewer rows than ranks
    st.tuples(st.integers(1, 700)),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3)),
)


def route(pair: str) -> Route:
    spec, _, exchange = pair.partition("@")
    return Route(exchange, make(spec))


def gradients(world: int, shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=gen) for _ in range(world)]


def pending(stores: list[MemoryStore], shape: tuple[int, ...], nodes: int) -> torch.Tensor:
    """What is still owed to the mean gradient: (1/N)·Σ of the stripes' residuals, and the owners' once."""
    total = torch.zeros(shape, dtype=torch.float64)
    for store in stores:
        slots: dict[str, Any] = store.export().get("layer", {})
        for key, weight in (("node.residual", 1 / nodes), ("owner.residual", 1.0)):
            if key in slots:
                start, value = slots[key]["start"], slots[key]["value"]
                total[start : start + len(value)] += weight * value
        assert set(slots) <= {"node.residual", "owner.residual"}
    return total


def test_all_codecs_with_an_exchange_that_takes_stripes_go_between_nodes():
    named = {p.partition(":")[0].partition("@")[0] for p in PAIRS}
    assert named == set(compressors()) - {"powersgd", "blocks"}


@pytest.mark.parametrize("pair", PAIRS)
@settings(max_examples=examples(12))
@given(nodes=nodes, local=local, shape=shapes, seed=st.integers(0, 99))
def test_all_ranks_end_with_the_same_finite_bytes(pair, nodes, local, shape, seed):
    results = exchange_once(route(pair), gradients(nodes * local, shape, seed), local=local)
    assert all(torch.equal(results[0], r) for r in results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize("pair", FEEDBACK)
@settings(max_examples=examples(8))
@given(nodes=nodes, local=local, shape=shapes, seed=st.integers(0, 99))
def test_what_was_sent_and_what_is_pending_add_up_to_all_gradients(pair, nodes, local, shape, seed):
    size = nodes * local
    stores = [MemoryStore() for _ in range(size)]
    sent, produced = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for step in range(6):
        grads = gradients(size, shape, seed + 1000 * step)
        produced += sum(g.double() for g in grads) / size
        sent += exchange_once(route(pair), grads, stores=stores, step=step, local=local)[0].double()
    error = (sent + pending(stores, shape, nodes) - produced).abs()
    # a 16-bit all-reduce adds in 16 bits, which no residual sees
    tolerance = {"fp16@dense": 2e-2, "bf16@dense": 2e-1}.get(pair, 5e-5)
    assert not error.numel() or error.max() < tolerance


@pytest.mark.parametrize("pair", ["none@dense", "none@gather", "none@scatter_gather"])
@given(nodes=nodes, local=local, shape=shapes, seed=st.integers(0, 99))
def test_the_identity_gives_the_mean(pair, nodes, local, shape, seed):
    grads = gradients(nodes * local, shape, seed)
    mean = torch.stack(grads).mean(0)
    torch.testing.assert_close(exchange_once(pair, grads, local=local)[0], mean, atol=1e-6, rtol=1e-5)


@given(nodes=st.sampled_from([1, 2, 4]), local=st.sampled_from([2, 4]), shape=shapes, seed=st.integers(0, 99))
def test_whole_numbers_are_averaged_exactly_where_ranks_are_a_power_of_two(nodes, local, shape, seed):
    grads = [(100 * g).round() for g in gradients(nodes * local, shape, seed)]
    for result in exchange_once("none@dense", grads, local=local):
        assert torch.equal(result, torch.stack(grads).mean(0))


@pytest.mark.parametrize("pair", [p for p in PAIRS if not p.endswith("scatter_gather")])
def test_a_scalar_reaches_all_ranks(pair):
    grads = [torch.tensor(float(r)) for r in range(6)]
    results = exchange_once(route(pair), grads, local=3)
    assert all(torch.equal(results[0], r) and r.shape == () for r in results)
    if pair.startswith("none"):
        assert float(results[0]) == pytest.approx(2.5)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [-1, *full(0, 200)])
def test_a_non_finite_value_on_one_rank_reaches_every_rank(pair, bad, where):
    grads = gradients(6, (12, 30), 5)
    grads[4].view(-1)[where] = bad
    for result in exchange_once(route(pair), grads, local=2):
        assert not result.isfinite().all()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_other_dtypes_come_back_in_their_own(pair, dtype):
    grads = [g.to(dtype) for g in gradients(4, (8, 40), 3)]
    results = exchange_once(route(pair), grads, local=2)
    assert results[0].dtype == dtype
    assert all(torch.equal(results[0], r) for r in results)


def test_the_mean_of_the_largest_values_does_not_overflow_on_the_way():
    grads = [torch.full((4, 4), 3e38) for _ in range(4)]
    assert torch.equal(exchange_once("none@dense", grads, local=2)[0], grads[0])


def test_random_codecs_draw_other_numbers_for_each_stripe():
    grads = [torch.ones(2, 4000) for _ in range(4)]
    mean = exchange_once(route("randomk:ratio=0.5@dense"), grads, local=2)[0]
    assert not torch.equal(mean[0] != 0, mean[1] != 0)


def bucket(pairs: list[str], h: Hierarchy, seen: list[list[str]], seed: int) -> tuple[Any, list[torch.Tensor]]:
    """A bucket of layers of odd shapes by several routes, and what its gradients become; ``seen`` gets its scopes."""
    grads, cuts = [], {}
    routes: dict[str, list[LayerTask]] = {}
    for i, (pair, shape) in enumerate(zip(pairs, [(7, 5), (1, 9), (), (33,)] * 4, strict=False)):
        r = route(pair if shape else "none@dense")
        spec = LayerSpec(f"layer{i}", shape)
        part = h.share(r.codec, spec)
        stripe = r.carrier().owned(r.codec, part.spec, part.world)
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed + i))
        memory = Memory.zeros(r.codec, part.spec)
        owner = Memory.zeros(r.codec, stripe.spec) if stripe else Memory({}, {})
        item = LayerTask(spec, r.codec, grad, memory, Seeds(0, 0, spec.name), Meter(grad.device), owner)
        routes.setdefault(r.exchange, []).append(item)
        cuts[spec.name] = h.cut(r.codec, spec)
        grads.append(grad)

    def watched():
        for batch in two_level.rounds(routes, cuts, World(h.rank, len(h.nodes) * h.local.size), h.local, h.inter):
            seen.append([scope_of(c) for c in batch])
            yield batch

    return watched(), grads


@settings(max_examples=examples(30))
@given(nodes=st.integers(2, 3), local=local, pairs=st.lists(st.sampled_from(PAIRS), min_size=1, max_size=6))
def test_layers_by_several_routes_in_one_bucket_meet_only_scopes_that_their_lane_has_a_group_for(nodes, local, pairs):
    table = tuple(tuple(range(n * local, (n + 1) * local)) for n in range(nodes))
    seen: list[list[list[str]]] = [[] for _ in range(nodes * local)]
    trips, grads = zip(
        *(bucket(pairs, Hierarchy(table, r), seen[r], 50 * r) for r in range(nodes * local)), strict=True
    )
    run(trips, local)
    for layer in zip(*grads, strict=True):
        assert all(torch.equal(layer[0], other) for other in layer)
    assert all(s == seen[0] for s in seen)  # as many rounds of the same scopes on every rank
    lanes = scopes({r.exchange for r in map(route, pairs)}, Hierarchy(table, 0))
    for lane, batch in zip(lanes, seen[0], strict=False):
        assert set(batch) <= set(lane)
    assert len(seen[0]) <= len(lanes)


@pytest.mark.parametrize(
    ("exchanges", "flat", "expected"),
    [
        ({"dense"}, [("world",)], [("local",), ("inter",), ("local",)]),
        ({"dense", "scatter_gather"}, [("world",)] * 2, [("local",), ("inter",), ("inter", "local"), ("local",)]),
        (
            {"dense", "factors"},
            [("world", "hosts"), ("world",)],
            [("local", "world", "hosts"), ("inter", "world"), ("local",)],
        ),
    ],
)
def test_a_lane_has_groups_for_the_scopes_it_may_meet_and_no_others(exchanges, flat, expected):
    found = scopes(exchanges, Hierarchy(((0, 1), (2, 3)), 0))
    assert found == expected
    assert scopes(exchanges, None) == flat


def test_ranks_that_ask_for_other_scopes_are_refused_by_the_simulation():
    def asks(scope):
        yield [Among(scope, AllReduce(torch.zeros(1)))]

    with pytest.raises(ValueError, match="different scopes"):
        run([asks("local"), asks("inter")], 1)
