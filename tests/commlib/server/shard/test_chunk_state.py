"""A chunk at its shard: the same as one process would compute, once, refusing what is not finite; and its replica."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import Optimizer

from commlib.errors import ProtocolError
from commlib.runtime.amp import finite
from commlib.runtime.optimizers import BY_ELEMENT, Recipe, Replace
from commlib.server.job.consistency import ASP, BSP, SSP, Consistency, make
from commlib.server.shard.chunk_state import ChunkState
from tests.support.tiers import examples

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def sgd(parameters: Sequence[torch.nn.Parameter]) -> Optimizer:
    return SGD(parameters)


def cell(rule: Consistency | None = None, workers: int = 2, n: int = 5, **options: Any) -> ChunkState:
    return ChunkState(torch.linspace(-1, 1, n), sgd, range(workers), (rule or BSP()).threshold(), **options)


def gradient(*seed: int, n: int = 5) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(hash(seed) % (1 << 31)))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def test_a_cell_of_sums_holds_the_last_steps_and_what_is_not_finite_only_for_that_step() -> None:
    book = ChunkState(torch.zeros(3), Recipe(Replace, {}).make, range(3), BSP().threshold(), mean=False)
    steps = [[1.0, 2.0, 3.0], [torch.nan, 1.0, torch.inf], [0.5, 0.5, 0.5]]
    for t, values in enumerate(steps):
        for worker in (2, 0, 1):
            given = torch.tensor([values[worker], 1.0, -1.0])
            applied = book.push(worker, t, given)
        assert not applied[0].refused
        assert torch.equal(book.values[1:], torch.tensor([3.0, -3.0]))
        assert book.values[0].item() == sum(values) or t == 1
    assert Recipe(Replace, {}).by_element


@pytest.mark.parametrize("kind", sorted(BY_ELEMENT))
@pytest.mark.parametrize("mean", [True, False])
def test_in_bulk_it_is_a_serial_optimizer_on_the_mean_or_sum_to_the_last_bit(kind: str, mean: bool) -> None:
    recipe = Recipe(getattr(torch.optim, kind), {"lr": 0.01})
    book = ChunkState(torch.linspace(-1, 1, 5), recipe.make, range(3), BSP().threshold(), mean=mean)
    serial = torch.nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = recipe.make([serial])
    for t in range(5):
        gradients = [gradient(w, t) for w in range(3)]
        for worker in random.Random(t).sample(range(3), 3):
            book.push(worker, t, gradients[worker])
        serial.grad = (gradients[0] + gradients[1] + gradients[2]) / (3 if mean else 1)
        optimizer.step()
        assert torch.equal(book.values, serial.data)


@pytest.mark.parametrize("kind", sorted(BY_ELEMENT))
def test_chunks_are_updated_as_the_whole_is_and_gradients_stay_as_they_were(kind: str) -> None:
    recipe = Recipe(getattr(torch.optim, kind), {"lr": 0.01})
    assert recipe.by_element
    start = torch.linspace(-1, 1, 9)
    whole = ChunkState(start.clone(), recipe.make, [0], BSP().threshold())
    parts = [ChunkState(part.clone(), recipe.make, [0], BSP().threshold()) for part in start.split([2, 6, 1])]
    for t in range(4):
        pushed = gradient(t, n=9)
        (applied,) = whole.push(0, t, pushed)
        assert torch.equal(pushed, gradient(t, n=9))
        assert applied.gradient is not None
        assert torch.equal(applied.gradient, pushed)
        for part, g in zip(parts, pushed.split([2, 6, 1]), strict=True):
            part.push(0, t, g)
    assert torch.equal(torch.cat([part.values for part in parts]), whole.values)


def test_otherwise_a_push_counts_as_one_of_all_workers_at_once() -> None:
    book = ChunkState(torch.zeros(2), lambda p: torch.optim.SGD(p, lr=1.0), range(4), ASP().threshold())
    book.push(3, 0, torch.tensor([4.0, 8.0]))
    assert book.values.tolist() == [-1.0, -2.0]
    assert book.included == {0: 0, 1: 0, 2: 0, 3: 1}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_goes_into_no_value_and_the_step_is_the_others(bad: float) -> None:
    book, other = cell(), cell(workers=1)
    book.push(0, 0, gradient(0).index_fill(0, torch.tensor([3]), bad))
    (applied,) = book.push(1, 0, gradient(1))
    other.push(0, 0, gradient(1))
    assert applied.stamps == {0: 0, 1: 0}
    assert torch.equal(book.values, other.values)
    book.push(0, 1, torch.full((5,), bad))
    (applied,) = book.push(1, 1, torch.full((5,), bad))
    assert applied.gradient is None
    assert torch.equal(book.values, other.values)
    assert book.due(0) == book.due(1) == 2


def test_finite_is_told_from_not_finite_even_where_the_sum_is_too_large() -> None:
    assert finite(torch.full((4,), 3e38))
    assert finite(torch.arange(3))
    assert not finite(torch.tensor([torch.inf, -torch.inf]))
    assert not finite(torch.tensor([1.0, torch.nan]))


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(5, 1), torch.zeros(5, dtype=torch.float64)])
def test_a_push_of_another_model_is_refused_with_both_sides_named(wrong: Tensor) -> None:
    with pytest.raises(ProtocolError, match=r"worker 1 pushes torch\.float.* of shape .* to values of torch\.float32"):
        cell().push(1, 0, wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", "0.1"), ("lr", math.nan), ("lr", math.inf), ("lr", -0.1), ("lr", None), ("lr", True), ("lr", [0.1]),
        ("lr", {}), ("momentum", "x"), ("betas", 0.9), ("betas", [0.9]), ("betas", [0.9, 1.0]), ("betas", [0.9, -0.1]),
        ("betas", [math.nan, 0.9]), ("amsgrad", 1), ("amsgrad", "yes"), ("foreach", 2),
    ],
)  # fmt: skip
def test_an_option_that_no_such_optimizer_can_have_is_refused_and_the_others_go_on(name: str, value: object) -> None:
    kinds = {"momentum": functools.partial(torch.optim.SGD, lr=0.1)}
    kind = kinds.get(name, functools.partial(torch.optim.Adam, lr=0.1, foreach=None))
    made = ChunkState(torch.linspace(-1, 1, 5), lambda p: kind(p), range(2), ASP().threshold())
    before = made.values.clone()
    with pytest.raises(ProtocolError, match=rf"worker 0 has {name}=.*, which an optimizer made with .* cannot take"):
        made.push(0, 0, gradient(0), {name: value})
    assert torch.equal(made.values, before)
    assert made.push(1, 0, gradient(1), {"lr": 0.2})
    assert made.push(0, 0, gradient(0))
    assert made.values.isfinite().all()


@given(lr=st.floats(0, 1e3), betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)), flag=st.booleans())
def test_options_that_a_scheduler_may_set_are_taken(lr: float, betas: tuple[float, float], flag: bool) -> None:
    made = ChunkState(torch.zeros(5), functools.partial(torch.optim.Adam, lr=0.1), range(1), ASP().threshold())
    made.push(0, 0, gradient(0), {"lr": lr, "betas": list(betas), "weight_decay": 1, "maximize": flag, "foreach": flag})
    assert made.optimizer.param_groups[0]["lr"] == lr
    assert made.values.isfinite().all()


def test_a_read_waits_until_the_values_are_new_enough() -> None:
    book = cell(SSP(1))
    book.push(0, 0, gradient(0))
    assert book.read(0, 1) is not None
    book.push(0, 1, gradient(0))
    assert book.read(0, 2) is None
    book.push(1, 0, gradient(1))
    assert torch.equal(book.read(0, 2), book.values)  # type: ignore[arg-type]


def test_a_worker_that_leaves_lets_the_step_through_without_it() -> None:
    book, other = cell(workers=2), cell(workers=1)
    assert book.push(1, 0, gradient(1)) == []
    (applied,) = book.leave(0)
    other.push(0, 0, gradient(1))
    assert applied.stamps == {1: 0}
    assert torch.equal(book.values, other.values)


def test_a_replica_that_missed_an_update_says_so_and_one_that_comes_twice_is_done_once() -> None:
    owner, replica = cell(workers=1), cell(workers=1)
    first, second = owner.push(0, 0, gradient(0))[0], owner.push(0, 1, gradient(1))[0]
    with pytest.raises(ProtocolError, match="update 1 of a replica that has 0: one is missing"):
        replica.follow(second)
    for applied in (first, second, first, second):
        replica.follow(applied)
    assert same(replica.state_dict(), owner.state_dict())


@pytest.mark.parametrize("spec", ["bsp", "ssp:2", "asp"])
def test_what_is_saved_goes_on_as_if_nothing_had_been(spec: str) -> None:
    book = cell(make(spec))
    for t in range(3):
        for w in range(2):
            book.push(w, t, gradient(w, t))
    saved = book.state_dict()
    other = cell(make(spec))
    other.load_state_dict(saved)
    for t in range(2, 5):  # one once more
        for w in range(2):
            assert bool(other.push(w, t, gradient(w, t))) == bool(book.push(w, t, gradient(w, t)))
    assert same(other.state_dict(), book.state_dict())


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a state with torch.float32 of shape \(4,\), for values of torch.float32"):
        cell().load_state_dict(cell(n=4).state_dict())


def test_a_restored_cell_has_the_workers_that_it_had() -> None:
    book = cell(SSP(3), workers=3)
    book.push(1, 0, gradient(1, 0))
    book.leave(0)
    other = ChunkState(torch.zeros(5), sgd, [9], SSP(3).threshold())
    other.load_state_dict(book.state_dict())
    assert dict(other.included) == {1: 1, 2: 0}
    other.join(0, 4)
    assert other.due(0) == 4


def applied_to(book: ChunkState) -> dict[str, Any]:
    """All but what is held."""
    state = book.state_dict()
    return {**state, "ledger": state["ledger"]["included"]}


def kills(rule: Callable[[], Consistency], workers: int, rng: random.Random) -> None:
    """An owner and its replica; the owner dies again and again, its replica takes its place, and workers send again
    what was not acknowledged. The model: acknowledged ⇒ applied; applied once; and values as of those applied."""
    threshold = rule().threshold
    owner, replica = (ChunkState(torch.zeros(3), sgd, range(workers), threshold()) for _ in range(2))
    witness = ChunkState(torch.zeros(3), sgd, range(workers), threshold())  # follows all that survives, and never dies
    on_its_way: list[Any] = []
    sent = [0] * workers
    acknowledged = [0] * workers  # up to here

    def reach_replica(count: int) -> None:
        for applied in on_its_way[:count]:
            replica.follow(applied)
            witness.follow(applied)
            for worker, stamp in applied.stamps.items():
                acknowledged[worker] = max(acknowledged[worker], stamp + 1)
        del on_its_way[:count]

    for _ in range(40):
        worker = rng.randrange(workers)
        if rng.random() < 0.1:  # killed: what had not reached the replica is gone
            reach_replica(rng.randint(0, len(on_its_way)))
            on_its_way.clear()
            survivor = ChunkState(torch.zeros(3), sgd, range(workers), threshold())
            survivor.load_state_dict(replica.state_dict())
            owner = survivor
            for w in range(workers):
                assert owner.due(w) >= acknowledged[w]
                for stamp in range(acknowledged[w], sent[w]):
                    on_its_way += owner.push(w, stamp, gradient(w, stamp, n=3))
        elif owner.read(worker, sent[worker]) is not None:
            on_its_way += owner.push(worker, sent[worker], gradient(worker, sent[worker], n=3))
            sent[worker] += 1
        else:
            reach_replica(rng.randint(0, len(on_its_way)))
    reach_replica(len(on_its_way))
    for copy in (replica, witness):
        assert same(applied_to(copy), applied_to(owner))
    assert all(acknowledged[w] >= owner.included[w] for w in range(workers))


@settings(max_examples=examples(40))
@given(st.sampled_from(["bsp", "ssp:1", "asp"]), st.integers(1, 3), st.integers(0, 1 << 32))
def test_when_owners_die_no_acknowledged_push_is_lost_and_none_is_applied_twice(
    spec: str, workers: int, seed: int
) -> None:
    kills(lambda: make(spec), workers, random.Random(seed))
