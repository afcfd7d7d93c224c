"""Small layers that go as they are ride with what else their bucket sends: one collective less, all else as before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.base import LayerSpec, Memory, Seeds
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import make
from commlib.exchange import fusion
from commlib.exchange.chunking import Routes
from commlib.exchange.collectives import Rounds, lockstep
from commlib.exchange.fusion import riding
from commlib.exchange.layer_task import LayerTask, SharedMeters
from commlib.exchange.registry import EXCHANGES
from commlib.groups.world import World
from commlib.planning.route import Route
from commlib.planning.simulate import run
from commlib.telemetry.stats import Meter
from tests.support.rank_pool import Fleet
from tests.support.tiers import full, long
from tests.support.tiny_ddp import Trainer, same_everywhere, through_delays, train_poisoned

ROUNDS = {
    "onebit@gather": [["AllGather"]],
    "onebit@scatter_gather": [["AllToAll"], ["AllGather"]],
    "powersgd:rank=2@low_rank": [["AllReduce"], ["AllReduce"]],
}
CPU = torch.device("cpu")


def item(rule: str, name: str, grad: Tensor, store: MemoryStore, world: World) -> tuple[str, LayerTask]:
    codec, _, exchange = rule.partition("@")
    route, spec = Route(exchange, make(codec)), LayerSpec.of(grad, name)
    stripe = route.carrier().owned(route.codec, spec, world)
    slots = {} if stripe is None else route.codec.slots(stripe.spec)
    owner = store.owner(spec, slots, 0 if stripe is None else stripe.start)
    memory = store.memory(spec, route.codec.slots(spec))
    return exchange, LayerTask(spec, route.codec, grad, memory, Seeds(0, 0, name), Meter(CPU), owner)


@dataclasses.dataclass
class Rank:
    """Its layers, and what was asked of the others meanwhile."""

    rules: Sequence[tuple[str, tuple[int, ...]]]
    world: World
    dtype: torch.dtype = torch.float32
    rounds_of: list[list[str]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.world.rank)
        self.given = [torch.randn(shape, generator=generator).to(self.dtype) for _, shape in self.rules]
        self.grads = [g.clone() for g in self.given]
        self.routes: dict[str, list[LayerTask]] = {}
        for i, ((rule, _), grad) in enumerate(zip(self.rules, self.grads, strict=True)):
            exchange, it = item(rule, str(i), grad, MemoryStore(), self.world)
            self.routes.setdefault(exchange, []).append(it)

    def go(self, routes: Routes) -> Rounds:
        return lockstep([EXCHANGES[x].rounds(items, self.world, None) for x, items in routes.items()])

    def ride(self) -> Rounds:
        for batch in riding(self.routes, self.world, SharedMeters().of, self.go):
            self.rounds_of.append([type(call).__name__ for call in batch])
            yield batch


def exchanged(
    rules: Sequence[tuple[str, tuple[int, ...]]], world: int, dtype: torch.dtype = torch.float32
) -> list[Rank]:
    ranks = [Rank(rules, World(rank, world), dtype) for rank in range(world)]
    run([r.ride() for r in ranks])
    return ranks


def alone(rules: Sequence[tuple[str, tuple[int, ...]]], world: int, dtype: torch.dtype) -> list[Rank]:
    """The same with nobody riding."""
    ranks = [Rank(rules, World(rank, world), dtype) for rank in range(world)]
    run([r.go(r.routes) for r in ranks])
    return ranks


@given(
    carrier=st.sampled_from(sorted(ROUNDS)),
    small=st.lists(st.sampled_from([(), (1,), (7,), (3, 5), (130,), (0,)]), min_size=1, max_size=4),
    world=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_riders_get_their_mean_and_the_others_the_bits_they_get_without(
    carrier: str, small: list[tuple[int, ...]], world: int, dtype: torch.dtype
) -> None:
    rules = [("none@dense", shape) for shape in small]
    rules[1:1] = [(carrier, (40, 30)), (carrier, (60, 20))]
    ranks, wanted = exchanged(rules, world, dtype), alone(rules, world, dtype)
    for i, (rule, _) in enumerate(rules):
        assert all(torch.equal(r.grads[i], ranks[0].grads[i]) for r in ranks)
        if rule == carrier:
            assert torch.equal(ranks[0].grads[i], wanted[0].grads[i])
        else:
            mean = torch.stack([r.given[i].double() for r in ranks]).mean(0)
            bound = 1e-6 if dtype == torch.float32 else 0.03
            assert torch.allclose(ranks[0].grads[i].double(), mean, atol=bound)
    assert ranks[0].rounds_of == ROUNDS[carrier]  # and no all-reduce beside it


def test_layers_that_travel_as_one_have_one_meter_for_good_and_share_it_by_their_values() -> None:
    shared, layers = SharedMeters(), Rank([("none@dense", (16,)), ("none@dense", (48,))], World(0, 1)).routes["dense"]
    meter = shared.of(layers)
    assert shared.of(layers) is meter is not shared.of(layers[:1])
    meter.add_sent(400)
    assert [it.meter.sent() for it in layers] == [100, 300]


MANY = fusion.MOST // 4


@pytest.mark.parametrize(
    ("rules", "world", "first"),
    [
        ([("onebit@gather", (40, 30))], 4, ["AllGather"]),
        ([("onebit@gather", (40, 30)), ("none@dense", (MANY,))], 2, ["AllGather"]),
        ([("onebit@gather", (40, 30)), ("none@dense", (MANY + 1,))], 2, ["AllGather", "AllReduce"]),
        ([("onebit@gather", (40, 30)), ("none@dense", (9,)), ("none@dense", (MANY,))], 2, ["AllGather", "AllReduce"]),
        # at four ranks a gather sends twice what an all-reduce does
        ([("onebit@gather", (40, 30)), ("none@dense", (2730,))], 4, ["AllGather"]),
        ([("onebit@gather", (40, 30)), ("none@dense", (2731,))], 4, ["AllGather", "AllReduce"]),
        ([("onebit@scatter_gather", (40, 30)), ("none@dense", (MANY,))], 4, ["AllToAll"]),
        ([("powersgd@low_rank", (40, 30)), ("none@dense", (MANY,))], 4, ["AllReduce"]),
        # two carriers: one of them takes it
        (
            [("onebit@gather", (40, 30)), ("powersgd@low_rank", (40, 30)), ("none@dense", (9,))],
            4,
            ["AllGather", "AllReduce"],
        ),
        # a dense layer that is coded stays, so nothing would be saved
        (
            [("onebit@gather", (40, 30)), ("none@dense", (9,)), ("fp16@dense", (9, 3))],
            4,
            ["AllGather", "AllReduce", "AllReduce"],
        ),
        ([("blocks@blocks", (40, 30)), ("none@dense", (9,))], 4, ["AllReduce", "AllReduce"]),
        ([("none@dense", (9,))], 4, ["AllReduce"]),
    ],
)
def test_who_rides_is_small_goes_as_it_is_and_costs_few_bytes(
    rules: list[tuple[str, tuple[int, ...]]], world: int, first: list[str]
) -> None:
    assert sorted(exchanged(rules, world)[0].rounds_of[0]) == first


def test_a_layer_with_something_held_back_does_not_ride() -> None:
    ranks = [Rank([("onebit@gather", (40, 30)), ("none@dense", (9,))], World(r, 2)) for r in range(2)]
    for r in ranks:
        held = Memory({"residual": torch.zeros(9)}, {"residual": torch.zeros(9)})
        r.routes["dense"] = [dataclasses.replace(it, memory=held) for it in r.routes["dense"]]
    run([r.ride() for r in ranks])
    assert sorted(ranks[0].rounds_of[0]) == ["AllGather", "AllReduce"]


RULES = {
    "gather": {"*.bias": "none", "*": "onebit@gather"},
    "scatter_gather": {"*.bias": "none", "*": "int8@scatter_gather"},
    "low_rank": {"*.bias": "none", "*": "powersgd:rank=2"},
    "several": {
        "*.bias": "none",
        "0.weight": "onebit@gather",
        "2.weight": "topk:ratio=0.1@scatter_gather",
        "*": "fp16",
    },
}


def trainer_of(world: World, rule: Any) -> Trainer:
    return Trainer(world, rule, cap=1.0)


def real(world: World, rule: Any, steps: int) -> tuple[bool, bool, bool]:
    """Whether biases did ride, all bytes are some layer's, and replicas are equal; in a process of its own."""
    trainer = trainer_of(world, rule)
    trainer.train(steps)
    stats = trainer.comm.stats()
    counted = abs(sum(layer.wire_bytes for layer in stats.layers.values()) - stats.wire_bytes) <= len(stats.layers)
    biases = all(stats.layers[name].wire_bytes > 0 for name in ("0.bias", "2.bias", "4.bias"))
    trainer.close()
    rode = bool(trainer.comm._buckets._shared._made)
    return rode, counted and biases, same_everywhere(world, trainer.weights())


@pytest.mark.parametrize("size", [3, *full(2)])
@pytest.mark.parametrize("rule", ["gather", "scatter_gather", "low_rank"])
def test_biases_of_a_model_ride(fleet: Fleet, rule: str, size: int) -> None:
    assert fleet.run(size, real, RULES[rule], 12) == [(True, True, True)] * size


def both_ways(world: World, rule: Any) -> bool:
    def trained() -> Tensor:
        trainer = trainer_of(world, rule)
        trainer.train(12)
        trainer.close()
        return trainer.weights()

    found, most = trained(), fusion.MOST
    fusion.MOST = -1
    wanted = trained()
    fusion.MOST = most
    return torch.equal(found, wanted)


@pytest.mark.parametrize("rule", RULES)
def test_between_two_ranks_a_model_gets_the_same_bits_as_without_riders(fleet: Fleet, rule: str) -> None:
    assert fleet.run(2, both_ways, RULES[rule]) == [True] * 2


def poisoned(world: World, rule: Any) -> tuple[list[bool], bool]:
    trainer = trainer_of(world, rule)
    finite = train_poisoned(trainer, 8, 3, "2.bias", float("inf"))
    trainer.close()
    return finite, bool(trainer.weights().isfinite().all()) and same_everywhere(world, trainer.weights())


@pytest.mark.parametrize("rule", ["gather", "scatter_gather", "low_rank"])
def test_a_rider_that_is_not_finite_takes_the_step_back(fleet: Fleet, rule: str) -> None:
    assert fleet.run(2, poisoned, RULES[rule]) == [([step != 3 for step in range(8)], True)] * 2


def delayed(world: World, repetitions: int) -> tuple[bool, bool]:
    unchanged, equal, _ = through_delays(lambda: Trainer(world, RULES["several"]), repetitions)
    return unchanged, equal


@pytest.mark.parametrize("steps", [20, *full(60), *long(200)])
def test_riders_that_are_late_at_random_end_with_the_same_bits(fleet: Fleet, steps: int) -> None:
    assert fleet.run(2, delayed, steps) == [(True, True)] * 2
