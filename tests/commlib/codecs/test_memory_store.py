"""What a store of slots does with a loss scale that is none (tests/commlib/codecs/test_drain.py: what leaves it)."""

from __future__ import annotations

import math

import pytest

from commlib.codecs.base import LayerSpec, Slot
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
