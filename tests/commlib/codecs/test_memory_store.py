"""What a store of slots does with a loss scale that is none, and with runs of layers (test_drain.py: what goes)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.codecs.base import LayerSpec, Memory, Slot
from commlib.codecs.memory_store import MemoryStore

SPEC = LayerSpec("layer", (4, 3))
RESIDUAL = {"residual": Slot((4, 3))}


def holding(value: float) -> MemoryStore:
    """A store after one step that has held back so much of everything."""
    store = MemoryStore()
    store.memory(SPEC, RESIDUAL).new["residual"].fill_(value)
    store.commit()
    return store


def held(store: MemoryStore) -> float:
    ((_, _, value),) = store.held()
    assert value.unique().numel() == 1
    return float(value[0, 0])


@pytest.mark.parametrize("unit", [0.0, -2.0, math.inf, math.nan])
def test_a_loss_scale_that_is_none_leaves_what_is_held_back_alone(unit: float) -> None:
    store = holding(3.0)
    store.rescale(unit)
    assert (held(store), store.unit) == (3.0, 1.0)
    store.rescale(8.0)
    assert (held(store), store.unit) == (24.0, 8.0)


def run_of(store: MemoryStore, *names: str) -> Memory:
    return store.run(names, [LayerSpec(name, (2, 3)) for name in names], {"residual": Slot(())})


def each(store: MemoryStore) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, _, value in store.held()}


def test_layers_of_a_run_keep_what_they_hold_back_however_they_are_grouped() -> None:
    store = MemoryStore()
    first = run_of(store, "a", "b")
    assert first.old["residual"].tolist() == [0.0] * 12
    first.new["residual"].copy_(torch.arange(12.0))
    store.commit()
    expected = {"a": [0.0, 1, 2, 3, 4, 5], "b": [6.0, 7, 8, 9, 10, 11]}
    assert each(store) == expected
    assert run_of(store, "b", "c", "a").old["residual"].tolist() == [*expected["b"], *[0.0] * 6, *expected["a"]]
    store.discard()
    assert each(store) == expected
    alone = store.memory(LayerSpec("b", (2, 3)), {"residual": Slot((2, 3))})
    assert alone.old["residual"].flatten().tolist() == expected["b"]
    alone.new["residual"].fill_(7.0)
    store.commit()
    assert run_of(store, "a", "b").old["residual"].tolist() == [*expected["a"], *[7.0] * 6]


def test_a_run_is_laid_once_and_what_no_run_uses_any_more_is_let_go() -> None:
    store = MemoryStore()
    places = set()
    for _ in range(6):
        places.add(run_of(store, "a", "b").new["residual"].data_ptr())
        store.commit()
    assert len(places) == 2
    run_of(store, "b", "a")
    store.commit()
    assert [names for names, _ in store._runs] == [("b", "a")]


@given(st.lists(st.sampled_from(["commit", "discard", "undo", "group", "scale", "load"]), max_size=12), st.data())
def test_a_run_holds_what_its_layers_would_by_themselves(course: list[str], data: st.DataObject) -> None:
    runs, layers, names = MemoryStore(), MemoryStore(), ["a", "b", "c"]
    generator, unit = torch.Generator().manual_seed(0), 1.0
    for what in course:
        values = torch.randn(len(names), 2, 3, generator=generator)
        if what == "group":
            names = data.draw(st.permutations(names))
        elif what == "scale":
            unit = data.draw(st.sampled_from([0.5, 2.0, 4.0]))
            runs.rescale(unit)
            layers.rescale(unit)
        elif what == "load":
            runs.restore("b", "residual", Slot((2, 3)), values[0])
            layers.restore("b", "residual", Slot((2, 3)), values[0])
        else:
            memory = run_of(runs, *names)
            for i, name in enumerate(names):
                alone = layers.memory(LayerSpec(name, (2, 3)), {"residual": Slot((2, 3))})
                assert torch.equal(alone.old["residual"], memory.old["residual"].view(-1, 2, 3)[i])
                alone.new["residual"].copy_(values[i])
            memory.new["residual"].view(-1, 2, 3).copy_(values)
            for store in (runs, layers):
                store.discard() if what == "discard" else store.commit()
                if what == "undo":
                    store.undo()
        assert each(runs) == each(layers)


def test_what_is_owed_to_nobody_is_not_held_back_by_a_run_either() -> None:
    store = MemoryStore()
    specs = [LayerSpec(name, (2, 3)) for name in "ab"]
    store.run(("a", "b"), specs, {"momentum": Slot((12,), role="local")}).new["momentum"].fill_(1.0)
    store.commit()
    assert each(store) == {}
    assert {slots["momentum"]["role"] for slots in store.export().values()} == {"local"}


def test_a_layer_with_more_than_its_run_uses_is_found() -> None:
    store = MemoryStore()
    store.memory(LayerSpec("b", (2, 3)), {"velocity": Slot((2, 3))}).new["velocity"].fill_(1.0)
    store.commit()
    run_of(store, "a", "b")
    assert store.crowded(["a", "b"], ["residual"]) == [1]
