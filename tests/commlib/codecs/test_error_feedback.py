"""Error feedback around any codec: which residual a step reads and writes, and how it fades."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from commlib.codecs.base import Compressor, LayerSpec
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.memory_store import MemoryStore
from commlib.compressors.topk import TopK

SPEC = LayerSpec("layer", (4,))
LARGEST = TopK(ratio=0.25)  # one of four values


def sent(codec: Compressor, store: MemoryStore, x: list[float]) -> list[float]:
    """What a step sends; it is neither committed nor discarded yet."""
    payload, out = torch.empty(codec.nbytes(SPEC), dtype=torch.uint8), torch.empty(SPEC.shape)
    codec.compress(torch.tensor(x), payload, memory=store.memory(SPEC, codec.slots(SPEC)), seed=0)
    codec.decompress(payload, out, seed=0)
    return out.tolist()


def residual(store: MemoryStore) -> list[float]:
    """What is held back, as committed."""
    ((_, _, value),) = store.held()
    return value.tolist()


@pytest.mark.parametrize(
    ("decay", "then", "left"),
    [(1.0, [0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]), (0.5, [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.0])],
)
def test_what_was_held_back_fades_by_the_decay_in_every_step(
    decay: float, then: list[float], left: list[float]
) -> None:
    codec, store = ErrorFeedback(LARGEST, decay), MemoryStore()
    assert sent(codec, store, [4.0, 2.0, 1.0, 0.0]) == [4.0, 0.0, 0.0, 0.0]
    store.commit()
    assert residual(store) == [0.0, 2.0, 1.0, 0.0]
    assert sent(codec, store, [0.0] * 4) == then
    store.commit()
    assert residual(store) == left


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_a_step_writes_beside_the_residual_that_it_reads_so_that_it_can_be_forgotten(decay: float) -> None:
    codec, store = ErrorFeedback(LARGEST, decay), MemoryStore()
    sent(codec, store, [4.0, 2.0, 1.0, 0.0])
    store.commit()
    first = sent(codec, store, [0.0] * 4)
    store.discard()
    assert residual(store) == [0.0, 2.0, 1.0, 0.0]
    assert sent(codec, store, [0.0] * 4) == first


@dataclasses.dataclass(frozen=True)
class Warming(TopK):
    """Somebody's codec with a schedule: half of the values in the first two steps."""

    name = "warming"

    def at(self, step: int) -> Compressor:
        return dataclasses.replace(self, ratio=0.5) if step < 2 else self


def test_at_a_step_the_codec_inside_is_that_of_the_same_step() -> None:
    codec = ErrorFeedback(Warming(ratio=0.25), 0.5)
    early = ErrorFeedback(Warming(ratio=0.5), 0.5)
    assert [codec.at(step) for step in range(4)] == [early, early, codec, codec]
    assert codec.at(2) is codec
