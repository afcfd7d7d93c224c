"""Whether a bucket is finite is seen by its codecs' scales where they have such, and by all its values elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.base import LayerSpec, Memory, Seeds
from commlib.codecs.registry import make
from commlib.ddp import buckets
from commlib.ddp.buckets import LARGE, room_for_scales, spans
from commlib.exchange.layer_task import LayerTask
from commlib.groups.world import World
from commlib.telemetry.stats import Meter
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import Trainer, same_everywhere, train_poisoned


def item(grad: Tensor, vouched: bool, codec: str = "int8") -> LayerTask:
    scales = room_for_scales(grad)
    if vouched and scales is not None:
        scales.append(torch.ones(1))
    none, meter = Memory({}, {}), Meter(torch.device("cpu"))
    return LayerTask(LayerSpec.of(grad), make(codec), grad, none, Seeds(0, 0, ""), meter, none, scales=scales)


@given(
    layers=st.lists(st.tuples(st.sampled_from([0, 5, LARGE - 1, LARGE, 2 * LARGE]), st.booleans()), max_size=6),
    start=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
)
def test_a_bucket_is_looked_at_once_everywhere(layers: list[tuple[int, bool]], start: int, order: Any) -> None:
    sizes = [n for n, _ in layers]
    buffer = torch.arange(start + sum(sizes) + 2)[start:].float()  # two values more than its layers have
    grads = torch.split(buffer, [*sizes, 2])[:-1]
    items = [item(grad, vouched) for grad, (_, vouched) in zip(grads, layers, strict=True)]
    order.shuffle(items)  # as routes have them
    found = spans(buffer, items)
    assert torch.equal(torch.cat([values.view(-1) for values, _ in found]), buffer)
    by_scales = {values.data_ptr(): values.numel() for values, scales in found if scales}
    assert by_scales == {
        g.data_ptr(): n for g, (n, vouched) in zip(grads, layers, strict=True) if vouched and n >= LARGE
    }


def test_a_bucket_of_nothing_has_nothing_to_look_at() -> None:
    assert spans(torch.zeros(0), []) == []


def test_a_shorter_format_may_overflow_where_scales_do_not() -> None:
    payload = torch.zeros(make("int8").nbytes(LayerSpec("x", (LARGE,))), dtype=torch.uint8)
    for dtype, vouched in ((torch.float32, [LARGE // 256]), (torch.float16, None), (torch.bfloat16, None)):
        it = item(torch.zeros(LARGE, dtype=dtype), vouched=False)
        it.vouch([payload], LayerSpec("x", (LARGE,)))
        assert (None if it.scales is None else [len(s) for s in it.scales]) == vouched


def test_scales_of_a_small_layer_are_not_looked_for() -> None:
    assert room_for_scales(torch.zeros(LARGE - 1)) is None
    assert room_for_scales(torch.zeros(LARGE)) == []


@pytest.mark.parametrize("codec", ["topk:ratio=0.1", "fp16", "none"])
def test_codecs_without_scales_vouch_for_nothing(codec: str) -> None:
    it = item(torch.zeros(LARGE), vouched=False, codec=codec)
    it.vouch([torch.zeros(it.codec.nbytes(it.spec), dtype=torch.uint8)], it.spec)
    assert it.scales == []


SCALED = ["onebit", "sign", "int8", "int4:block=7", "qsgd", "ternary", "natural"]


def bad_steps(world: World, exchange: str) -> list[str]:
    """Steps with one value that is not finite on one rank, all layers large enough for their scales; what is wrong."""
    buckets.LARGE, wrong = 1, []
    for codec in SCALED:
        for value in (math.nan, math.inf, -math.inf):
            trainer = Trainer(world, f"{codec}@{exchange}")
            found = train_poisoned(trainer, 5, 2, "2.weight", value)
            stats = trainer.comm.stats()
            trainer.close()
            weights = trainer.weights()
            if found != [True, True, False, True, True] or (stats.steps, stats.skipped) != (4, 1):
                wrong.append(f"{codec}, {value}: {found}, {stats.steps} count, {stats.skipped} do not")
            if not weights.isfinite().all() or not same_everywhere(world, weights):
                wrong.append(f"{codec}, {value}: weights")
    buckets.LARGE = LARGE
    return wrong


@pytest.mark.full
@pytest.mark.parametrize("exchange", ["scatter_gather", *full("gather")])
def test_one_value_that_is_not_finite_is_seen_by_the_scales(fleet: Fleet, exchange: str) -> None:
    assert fleet.run(2, bad_steps, exchange) == [[], []]
