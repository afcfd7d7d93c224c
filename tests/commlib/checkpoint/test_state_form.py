"""A state dict that is damaged anywhere is a CheckpointMismatch that names the place, and changes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.checkpoint import StateDict, from_state, merge_state_dicts, to_state
from commlib.codecs.base import LayerSpec, Slot
from commlib.codecs.memory_store import MemoryStore
from commlib.errors import CheckpointMismatch
from commlib.groups.world import World
from commlib.planning.plan import Plan
from commlib.planning.planner import make_plan
from tests.support.tiers import examples

SPECS = [LayerSpec("a.weight", (5, 8)), LayerSpec("b.weight", (6, 8)), LayerSpec("c", ())]
RULE = "powersgd:rank=1@low_rank"


def plan(size: int = 2) -> Plan:
    return make_plan(SPECS, RULE, world=size, min_size=0)


def part(rank: int, seed: int = 0) -> StateDict:
    """One rank's state: residuals and bases of two layers, a residual of some rows, and one of a scalar."""
    generator, store = torch.Generator().manual_seed(seed + rank), MemoryStore()
    for spec in SPECS[:2]:
        store.restore(spec.name, "residual", Slot(spec.shape), torch.randn(spec.shape, generator=generator))
        store.restore(spec.name, "basis", Slot((8, 1), "replicated"), torch.ones(8, 1))
    store.restore("a.weight", "owner.residual", Slot((2, 8)), torch.ones(2, 8), start=3)
    store.restore("c", "residual", Slot(()), torch.tensor(0.5))
    return to_state(plan(), store, World(rank, 2), 7)


def whole() -> StateDict:
    return merge_state_dicts([part(0), part(1)])


def load(state: Any, size: int = 2, rank: int = 1) -> tuple[MemoryStore, CheckpointMismatch | None]:
    """A store that held something else, after it was asked to take this state over; and what it said."""
    store = MemoryStore()
    store.restore("b.weight", "residual", Slot((6, 8)), torch.full((6, 8), 9.0))
    try:
        assert from_state(state, plan(size), store, World(rank, size), drop_residuals=False) >= 0
    except CheckpointMismatch as e:
        return store, e
    return store, None


def untouched(store: MemoryStore) -> bool:
    held = store.export()
    return list(held) == ["b.weight"] and bool((held["b.weight"]["residual"]["value"] == 9.0).all())  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_whole_is_taken_over_by_any_number_of_ranks(size: int) -> None:
    store, error = load(whole(), size, rank=0)
    assert error is None
    assert not untouched(store)


def test_residuals_of_two_ranks_become_their_mean_on_one() -> None:
    store, error = load(whole(), 1, rank=0)
    assert error is None
    both = [part(rank)["ranks"][str(rank)]["b.weight"]["residual"]["value"] for rank in (0, 1)]
    kept: Any = store.export()["b.weight"]["residual"]["value"]
    assert torch.equal(kept, ((both[0].double() + both[1].double()) / 2).float())


ENTRY = ("ranks", "1", "a.weight", "residual")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("format",), 3, "not a commlib state dict of format 1 or 2 (found 3)"),
        (("nodes",), "0,1", "not a commlib state dict of format 1 or 2 (found 1)"),
        (("world_size",), 2**70, "'world_size' is int 1180591620717411303424, and should be a number of ranks"),
        (("world_size",), 0, "'world_size' is int 0"),
        (("world_size",), True, "'world_size' is bool True"),
        (("world_size",), "2", "'world_size' is 2, and should be a number of ranks"),
        (("step",), -1, "'step' is int -1, and should be a number of steps"),
        (("step",), 1.5, "'step' is float 1.5"),
        (("layers",), [], "'layers' is list [], and should be a map"),
        (("layers", "a.weight"), 5, "'layers', 'a.weight' is int 5, and should be text"),
        (("routes",), None, "'routes' is NoneType None"),
        (("ranks",), [1, 2], "'ranks' is list [1, 2], and should be a map"),
        (("ranks", "2"), {}, "'ranks', '2' is 2, and should be one of 2 ranks"),
        (("ranks", 1), {}, "'ranks', 1 is int 1, and should be one of 2 ranks"),
        (("ranks", "01"), {}, "'ranks', '01' is 01"),
        (("ranks", "1"), None, "rank 1 is NoneType None, and should be a map of layers"),
        (("ranks", "1", "d"), {"r": {"value": torch.ones(3), "role": "pending"}}, "'d', 'r' is d, and should be of a"),
        (("ranks", "1", "x"), {}, "slots of 'x', which is no layer of the model"),
        (("ranks", "1", 5), {}, "rank 1, 5 is int 5, and should be a layer's name"),
        (("ranks", "1", "a.weight"), 5, "rank 1, 'a.weight' is int 5, and should be a map of slots"),
        (ENTRY, torch.ones(5, 8), "rank 1, 'a.weight', 'residual' is Tensor tensor("),
        ((*ENTRY, "value"), None, "'residual', 'value' is NoneType None, and should be a tensor"),
        ((*ENTRY, "value"), torch.ones(5, 8).double(), "is torch.float64, torch.strided on cpu, and should be"),
        ((*ENTRY, "value"), torch.eye(8).to_sparse(), "torch.sparse_coo on cpu, and should be dense float32"),
        ((*ENTRY, "value"), torch.ones(5, 8, device="meta"), "on meta, and should be dense float32"),
        ((*ENTRY, "value"), torch.full((5, 8), torch.nan), "is NaN or infinite somewhere"),
        ((*ENTRY, "value"), torch.full((5, 8), -torch.inf), "is NaN or infinite somewhere"),
        ((*ENTRY, "value"), torch.ones(8, 5), "is of shape (8, 5), and should be rows of (5, 8), from row 0"),
        ((*ENTRY, "value"), torch.ones(6, 8), "is of shape (6, 8), and should be rows of (5, 8)"),
        ((*ENTRY, "value"), torch.ones(40), "is of shape (40,), and should be rows of (5, 8)"),
        ((*ENTRY, "role"), "owed", "'role' is owed, and should be one of pending, local, replicated"),
        ((*ENTRY, "role"), None, "'role' is NoneType None"),
        ((*ENTRY, "start"), -1, "'start' is int -1, and should be a row"),
        ((*ENTRY, "start"), 2**70, "'start' is int 118059162071741130"),
        ((*ENTRY, "start"), "x", "'start' is x, and should be a row"),
        (("ranks", "1", "a.weight", "basis", "value"), torch.ones(9, 1), "slot 'basis' of 'a.weight' of shape (9, 1)"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_named_by_its_key_and_changes_nothing(path: tuple[str, ...], value: Any, said: str) -> None:
    state = whole()
    *outer, last = path
    place: Any = state
    for key in outer:
        place = place[key]
    place[last] = value
    store, error = load(state)
    assert error is not None
    assert said in str(error), str(error)
    assert untouched(store)


@pytest.mark.parametrize("state", [None, 5, "state", [], b"", torch.ones(2), {}, {"format": 1}])
def test_what_is_no_state_dict_at_all_is_said_to_be_none(state: Any) -> None:
    store, error = load(state)
    assert error is not None
    assert untouched(store)
    with pytest.raises(CheckpointMismatch):
        merge_state_dicts([state, state])


@pytest.mark.parametrize("nodes", ["", " ", 5, None, ["0,1"]])
def test_nodes_that_are_none_are_named(nodes: Any) -> None:
    store, error = load({**whole(), "format": 2, "nodes": nodes}, 1, rank=0)
    assert error is not None
    assert "'nodes' is" in str(error)
    assert untouched(store)


def test_many_ranks_that_are_missing_are_not_all_listed() -> None:
    state = whole()
    state["world_size"] = 1 << 40
    _, error = load(state)
    assert error is not None
    assert "(missing: rank 2, 3, 4, 5, 6, 7, 8, 9)" in str(error)


JUNK: list[Any] = [
    None, True, -1, 2**70, 1.5, float("nan"), "", "x", "1", b"x", [], [1], {}, {"value": 1}, {1: 2}, (), object(),
    torch.ones(3), torch.ones(5, 8).half(), torch.full((5, 8), torch.nan), torch.zeros(0), torch.ones(2, 8),
    torch.ones(()),
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))


def damaged(seed: int) -> StateDict:
    """A whole state in which some places were replaced, removed or added."""
    rng, state = random.Random(seed), copy.deepcopy(whole())
    for _ in range(rng.randint(1, 3)):
        *outer, last = rng.choice([*places(state)])
        place: Any = state
        for key in outer:
            place = place[key]
        match rng.randrange(4):
            case 0:
                del place[last]
            case 1:
                place[rng.choice(["x", 1, "", None, "2", "residual"])] = rng.choice(JUNK)
            case _:
                place[last] = rng.choice(JUNK)
    return state


@settings(max_examples=examples(300), deadline=None)
@given(seed=st.integers(0, 1 << 40), size=st.integers(1, 3))
def test_whatever_the_damage_it_is_named_or_it_did_no_harm(seed: int, size: int) -> None:
    state = damaged(seed)
    store, error = load(state, size, rank=0)
    if error is not None:
        assert untouched(store)
        return
    for layer, slots in store.export().items():
        shape = next(s.shape for s in SPECS if s.name == layer)
        for key, slot in slots.items():
            value: Any = slot["value"]
            assert value.dtype == torch.float32
            assert value.isfinite().all()
            assert "basis" in key or value.shape[1:] == shape[1:]


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_parts_that_are_damaged_are_not_merged_into_something_else_than_a_state(seed: int) -> None:
    try:
        merged = merge_state_dicts([damaged(seed), part(0)])
    except CheckpointMismatch:
        return
    assert load(merged, 2)[1] is None or merged["ranks"].keys() <= {"0", "1"}
