"""Large layers in parts: the same bits as in one piece, one part on its way while the next is coded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.base import Seeds
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import make
from commlib.exchange import chunking
from commlib.exchange.buffers import StepBuffers
from commlib.exchange.collectives import AllToAll, Rounds
from commlib.exchange.layer_task import ChunkIndex, LayerTask
from commlib.exchange.registry import EXCHANGES
from commlib.exchange.scatter_gather import _part, stripes
from commlib.groups.world import World
from commlib.planning.route import Route
from commlib.planning.simulate import run
from commlib.runtime.layers import LayerSpec
from commlib.telemetry.stats import Meter
from tests.support.rank_pool import Fleet
from tests.support.tiers import full, long
from tests.support.tiny_ddp import Trainer, same_everywhere, through_delays, train_poisoned

SIZE = 2000
DRAWING = {"qsgd", "ternary:block=64"}
CODECS = ["onebit", "int8", "int4:block=7", "bf16", *DRAWING]
ROUTES = [f"{codec}@{exchange}" for codec in CODECS for exchange in ("gather", "scatter_gather")] + ["bf16@dense"]


def item(route: Route, grad: Tensor, store: MemoryStore, world: World, step: int) -> LayerTask:
    spec = LayerSpec.of(grad, "layer")
    memory = store.memory(spec, route.codec.slots(spec))
    stripe = route.carrier().owned(route.codec, spec, world)
    slots = {} if stripe is None else route.codec.slots(stripe.spec)
    owner = store.owner(spec, slots, 0 if stripe is None else stripe.start)
    return LayerTask(spec, route.codec, grad, memory, Seeds(0, step, "layer"), Meter(grad.device), owner)


def own(of: object, part: int) -> tuple[StepBuffers, Meter]:
    return StepBuffers(), Meter(torch.device("cpu"))


def staggered(trips: list[Rounds]) -> Rounds:
    """As lanes may take them: a part's next round behind the first one of the part after it."""
    waiting, live = list(trips), list[Rounds]()
    while waiting or live:
        live += waiting[:1]
        del waiting[:1]
        for trip in list(live):
            batch = next(trip, None)
            if batch is None:
                live.remove(trip)
            else:
                yield batch


def train(route: Route, grads: list[list[Tensor]]) -> tuple[list[list[Tensor]], list[dict[str, Any]]]:
    """Per step and rank what comes of ``grads``, and what every rank remembers in the end."""
    size = len(grads[0])
    stores, results = [MemoryStore() for _ in range(size)], []
    for step, some in enumerate(grads):
        found = [g.clone() for g in some]
        ranks = []
        for rank, (grad, store) in enumerate(zip(found, stores, strict=True)):
            it = item(route, grad, store, World(rank, size), step)
            trips = chunking.in_parts({route.exchange: [it]}, own)
            rounds = [EXCHANGES[x].rounds(y, World(rank, size), None) for trip in trips for x, y in trip.items()]
            ranks.append(staggered(rounds))
        run(ranks)
        for store in stores:
            store.commit()
        results.append(found)
    return results, [store.export() for store in stores]


@contextmanager
def small_parts(size: int) -> Iterator[None]:
    before, chunking.SIZE = chunking.SIZE, size
    try:
        yield
    finally:
        chunking.SIZE = before


@given(
    rule=st.sampled_from([r for r in ROUTES if r.partition("@")[0] not in DRAWING]),
    world=st.integers(1, 4),
    shape=st.sampled_from([(300, 7), (40, 5, 6), (9, 300), (2000,), (1, 4000), (64, 64)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.integers(100, 3000),
    seed=st.integers(0, 2**32 - 1),
)
def test_bits_are_those_of_the_layer_in_one_piece(
    rule: str, world: int, shape: tuple[int, ...], dtype: torch.dtype, size: int, seed: int
) -> None:
    codec, _, exchange = rule.partition("@")
    route, generator = Route(exchange, make(codec)), torch.Generator().manual_seed(seed)
    grads = [[torch.randn(shape, generator=generator).to(dtype) for _ in range(world)] for _ in range(3)]
    with small_parts(size):
        cut, left = train(route, grads)
    whole, wanted = train(route, grads)
    assert all(torch.equal(a, b) for x, y in zip(cut, whole, strict=True) for a, b in zip(x, y, strict=True))
    assert all(torch.equal(a, step[0]) for step in cut for a in step)
    for mine, theirs in zip(left, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert all(torch.equal(mine[name][k]["value"], theirs[name][k]["value"]) for k in theirs[name])


@pytest.mark.parametrize("rule", [f"{codec}@{x}" for codec in sorted(DRAWING) for x in ("gather", "scatter_gather")])
def test_what_is_drawn_is_another_number_in_every_part_and_alike_on_all_ranks(rule: str) -> None:
    codec, _, exchange = rule.partition("@")
    grads = [[torch.full((128, 64), 0.3).index_fill(1, torch.tensor([0]), 1.0) for _ in range(2)]]
    with small_parts(4096):  # eight parts: of 16 rows, or of 8 of each rank's stripe
        ((first, *others),), _ = train(Route(exchange, make(codec)), grads)
    assert all(torch.equal(first, other) for other in others)
    rows = first.view(16, -1)
    assert not any(torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])


@given(
    codec=st.sampled_from(CODECS),
    rows=st.integers(0, 300),
    columns=st.integers(1, 300),
    world=st.integers(1, 5),
    count=st.integers(1, 9),
)
def test_parts_cover_a_layer_once_and_every_stripe_of_it(
    codec: str, rows: int, columns: int, world: int, count: int
) -> None:
    c, spec = make(codec), LayerSpec("x", (rows, columns))
    grad, store = torch.zeros(rows, columns), MemoryStore()
    whole = item(Route("gather", c), grad, store, World(0, world), 0)
    covered = [chunking._part(whole, ChunkIndex(i, count), *own("x", i)).alone().grad.shape[0] for i in range(count)]
    assert sum(covered) == rows
    for stripe in stripes(c, spec, world):
        cuts = [_part(c, stripe, ChunkIndex(i, count)) for i in range(count)]
        assert [p.start for p in cuts] == [stripe.start, *(p.stop for p in cuts[:-1])]
        assert cuts[-1].stop == stripe.stop
        unit = c.part_rows(stripe.spec)
        assert unit is not None
        assert all((p.stop - stripe.start) % unit == 0 or p.stop == stripe.stop for p in cuts)


@pytest.mark.parametrize("spec", ["none", "topk", "sign", "natural", "ternary", "onebit:axis=tensor", "powersgd"])
def test_what_is_coded_by_all_of_a_layer_is_not_cut(spec: str) -> None:
    grad = torch.zeros(64, 64)
    with small_parts(SIZE):
        assert chunking.count("gather", item(Route("gather", make(spec)), grad, MemoryStore(), World(0, 2), 0)) == 1


def test_a_layer_below_two_parts_is_not_cut_and_one_of_few_rows_no_finer_than_these() -> None:
    route = Route("gather", make("onebit"))

    def count(*shape: int) -> int:
        return chunking.count("gather", item(route, torch.zeros(shape), MemoryStore(), World(0, 2), 0))

    with small_parts(SIZE):
        assert [count(1, 999), count(999, 1), count(2, 4000), count(16, 256), count(4000)] == [1, 1, 2, 8, 8]


def test_what_is_not_cut_goes_with_the_last_parts_and_no_exchange_before_that_has_more_rounds() -> None:
    def one(rule: str, numel: int) -> LayerTask:
        codec, _, exchange = rule.partition("@")
        return item(Route(exchange, make(codec)), torch.zeros(numel // 256, 256), MemoryStore(), World(0, 2), 0)

    large, longer = one("onebit@gather", 4096), one("int8@scatter_gather", 6144)
    small, plain = one("onebit@scatter_gather", 256), one("none@dense", 9216)
    with small_parts(SIZE):
        trips = chunking.in_parts({"gather": [large], "scatter_gather": [longer, small], "dense": [plain]}, own)
    shown = [{x: [(i.spec.numel, i.part.index) for i in items] for x, items in trip.items()} for trip in trips]
    assert shown[0] == {"scatter_gather": [(6144, 0)]}
    assert shown[-1] == {"gather": [(4096, 7)], "scatter_gather": [(6144, 11), (256, 0)], "dense": [(9216, 0)]}
    assert len(shown) == 12
    met = [i.meter for trip in trips for items in trip.values() for i in items]
    assert len({id(meter) for meter in met}) == len(met) == 8 + 12 + 2
    rounds = [max(EXCHANGES[x].ROUNDS for x in trip) for trip in trips]
    assert rounds[-1] == max(rounds)


def test_every_rank_owns_some_of_every_part() -> None:
    route, sent = Route("scatter_gather", make("onebit")), []
    grads = [torch.randn(96, 256) for _ in range(3)]
    with small_parts(8 * SIZE):
        for rank, grad in enumerate(grads):
            it = item(route, grad, MemoryStore(), World(rank, 3), 0)
            for trip in chunking.in_parts({"scatter_gather": [it]}, own):
                (call,) = next(EXCHANGES["scatter_gather"].rounds(trip["scatter_gather"], World(rank, 3), None))
                assert isinstance(call, AllToAll)
                sent.append(call.splits)
    assert len(sent) == 3 * 6
    assert all(min(splits) > 0 for splits in sent)


RULE = {"0.weight": "onebit@scatter_gather", "2.weight": "int8@gather", "*": "bf16@dense"}


def real(world: World, rule: Any, steps: int) -> tuple[bool, bool, bool]:
    """Whether weights and residuals are those of uncut layers, and replicas the same."""

    def trained() -> tuple[Tensor, dict[str, Any]]:
        trainer = Trainer(world, rule, cap=0.001)
        trainer.train(steps)
        assert bool(trainer.comm._buckets._parts) == (chunking.SIZE == SIZE)
        state = trainer.comm.state_dict()["ranks"][str(world.rank)]
        stats = trainer.comm.stats()
        assert abs(sum(layer.wire_bytes for layer in stats.layers.values()) - stats.wire_bytes) <= len(stats.layers)
        trainer.close()
        return trainer.weights(), state

    whole, wanted = trained()
    with small_parts(SIZE):
        cut, state = trained()
    residuals = all(torch.equal(state[n][k]["value"], wanted[n][k]["value"]) for n in wanted for k in wanted[n])
    return torch.equal(cut, whole), residuals and bool(wanted), same_everywhere(world, cut)


@pytest.mark.parametrize("size", [2, *full(3)])
def test_training_in_parts_ends_with_the_same_bits(fleet: Fleet, size: int) -> None:
    assert fleet.run(size, real, RULE, 20) == [(True, True, True)] * size


def poisoned(world: World) -> tuple[list[bool], bool]:
    """A value that is not finite in one part of one rank's layer, in the fourth step."""
    with small_parts(SIZE):
        trainer = Trainer(world, RULE, cap=0.001)
        finite = train_poisoned(trainer, 8, 3, "0.weight", float("inf"))
        trainer.close()
    return finite, bool(trainer.weights().isfinite().all()) and same_everywhere(world, trainer.weights())


def test_a_value_that_is_not_finite_in_the_first_part_takes_all_of_the_step_back(fleet: Fleet) -> None:
    expected = [step != 3 for step in range(8)]
    assert fleet.run(2, poisoned) == [(expected, True)] * 2


def delayed(world: World, repetitions: int) -> tuple[bool, bool]:
    with small_parts(SIZE):
        unchanged, equal, naps = through_delays(lambda: Trainer(world, RULE, cap=0.001), repetitions)
    assert naps > 10 * repetitions
    return unchanged, equal


@pytest.mark.parametrize("steps", [8, *full(60), *long(200)])
def test_parts_that_are_late_at_random_end_with_the_same_bits(fleet: Fleet, steps: int) -> None:
    assert fleet.run(2, delayed, steps) == [(True, True)] * 2
