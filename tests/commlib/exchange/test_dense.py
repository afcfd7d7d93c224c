"""The dense exchange of payloads that are summed: in the gradient's own memory, or in a buffer beside it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.base import LayerSpec, Seeds
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.memory_store import MemoryStore
from commlib.codecs.registry import make
from commlib.codecs.slots import Memory
from commlib.compressors.fp16 import Float16
from commlib.errors import WrongGradient
from commlib.exchange.dense import DenseExchange, InPlace
from commlib.exchange.layer_task import LayerTask
from commlib.groups.world import World
from commlib.planning.simulate import exchange_once
from commlib.telemetry.stats import Meter

CODECS = ["fp16", "bf16", "fp16:ef=off", "bf16:ef=off", "fp16:residual=bfloat16", "bf16:ef=0.5"]


def steps(codec: str, world: int, shape: tuple[int, ...], first: int) -> tuple[list[Tensor], list[Any]]:
    """Means of three steps with blocks that begin with so many values, and what is left of the gradients."""
    stores = [MemoryStore() for _ in range(world)]
    gen, means = torch.Generator().manual_seed(world), []
    with patch.object(InPlace, "FIRST", first):
        for step in range(3):
            grads = [torch.randn(shape, generator=gen) for _ in range(world)]
            means += exchange_once(f"{codec}@dense", grads, stores=stores, step=step)
    return means, [store.export() for store in stores]


@pytest.mark.parametrize("codec", CODECS)
@given(
    world=st.integers(1, 4),
    shape=st.one_of(st.tuples(st.integers(1, 700)), st.tuples(st.integers(1, 40), st.integers(1, 40))),
    first=st.integers(1, 64),
)
def test_a_payload_in_the_gradients_memory_gives_the_bits_of_one_beside_it(
    codec: str, world: int, shape: tuple[int, ...], first: int
) -> None:
    means, left = steps(codec, world, shape, first)
    usual, usually_left = steps(codec, world, shape, 1 << 20)
    assert all(torch.equal(a, b) for a, b in zip(means, usual, strict=True))
    for ours, others in zip(left, usually_left, strict=True):
        assert ours.keys() == others.keys()
        for layer, slots in ours.items():
            assert all(torch.equal(slot["value"], others[layer][key]["value"]) for key, slot in slots.items())


def task(codec: Any, grad: Tensor, **options: Any) -> LayerTask:
    spec, none = LayerSpec.of(grad, "layer"), Memory({}, {})
    memory = Memory.zeros(codec, spec)
    return LayerTask(spec, codec, grad, memory, Seeds(0, 0, "layer"), Meter(grad.device), none, **options)


def exchange_alone(item: LayerTask) -> None:
    for _ in DenseExchange().rounds([item], World(0, 1), None):
        pass


@pytest.mark.parametrize("codec", CODECS)
def test_of_a_large_layer_hardly_any_memory_is_kept_for_its_payload(codec: str) -> None:
    item = task(make(codec), torch.randn(5 * InPlace.FIRST + 3), overwrite=True)
    exchange_alone(item)
    assert item.arena.nbytes == 2 * InPlace.FIRST


def test_a_gradient_that_may_not_be_overwritten_keeps_its_values_until_the_mean_is_there() -> None:
    given = torch.randn(4 * InPlace.FIRST)
    item = task(make("fp16:ef=off"), given.clone())
    rounds = DenseExchange().rounds([item], World(0, 1), None)
    next(rounds)
    assert torch.equal(item.grad, given)
    assert list(rounds) == []
    assert torch.equal(item.grad, given.half().float())


def test_a_gradient_that_begins_where_no_payload_may_is_coded_beside_it() -> None:
    bucket = torch.randn(4 * InPlace.FIRST + 1)
    given = bucket.clone()
    item = task(make("fp16:ef=off"), bucket[1:], overwrite=True)
    exchange_alone(item)
    assert item.arena.nbytes > 2 * InPlace.FIRST
    assert torch.equal(bucket[1:], given[1:].half().float())
    assert bucket[0] == given[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_other_dtypes_are_coded_beside_them(dtype: torch.dtype) -> None:
    given = torch.randn(4 * InPlace.FIRST).to(dtype)
    item = task(make("fp16:ef=off"), given.clone(), overwrite=True)
    exchange_alone(item)
    assert torch.equal(item.grad, given.float().half().to(dtype))


class Losing(Float16):
    """Loses the value 7."""

    def write(self, x: Tensor, payload: Tensor, carry: Any, seed: int) -> None:
        super().write(torch.where(x == 7, 0.0, x), payload, None, seed)
        if carry is not None:
            carry.new.copy_(carry.old)


@pytest.mark.parametrize(("at", "layer"), [(3, "a"), (InPlace.FIRST + 5, "b"), (4 * InPlace.FIRST - 1, "c")])
def test_what_a_codec_loses_is_said_of_its_layer_where_several_are_coded_as_one(at: int, layer: str) -> None:
    faults: list[WrongGradient] = []
    grad = torch.zeros(4 * InPlace.FIRST)
    grad[at] = 7.0
    layers = [(0, "a"), (InPlace.FIRST, "b"), (2 * InPlace.FIRST, "c")]
    item = task(ErrorFeedback(Losing()), grad, overwrite=True, faults=faults, layers=layers)
    exchange_alone(item)
    assert [str(fault).split(":")[0] for fault in faults] == [layer]
