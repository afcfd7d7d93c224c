"""``push_pull`` as an exchange: what it asks servers for, and that it does so as DDP would do it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commlib.codecs.base import Seeds
from commlib.codecs.registry import make
from commlib.codecs.slots import Memory
from commlib.exchange.collectives import Among, PushPull
from commlib.exchange.layer_task import LayerTask
from commlib.exchange.push_pull import PushPullExchange
from commlib.groups.world import World
from commlib.planning.route import resolve
from commlib.planning.simulate import exchange_once
from commlib.runtime.layers import LayerSpec
from commlib.telemetry.stats import Meter


def item(grad: Tensor, name: str = "layer") -> LayerTask:
    spec = LayerSpec.of(grad, name)
    return LayerTask(spec, make("none"), grad, Memory({}, {}), Seeds(0, 0, name), Meter(grad.device), Memory({}, {}))


def asked(items: list[LayerTask], world: World) -> list[PushPull]:
    (batch,) = PushPullExchange().rounds(items, world, None)  # one round, and nothing to compute after it
    calls = [c.call for c in batch if isinstance(c, Among) and c.scope == "servers"]
    assert len(calls) == len(batch) == len(items)
    return [c for c in calls if isinstance(c, PushPull)]


def test_a_layer_is_asked_for_by_its_name_where_its_gradient_is_and_a_copy_leaves() -> None:
    grads = [torch.randn(6, 4), torch.randn(7)]
    kept = [g.clone() for g in grads]
    for call, grad, old, name in zip(
        asked([item(grads[0], "a"), item(grads[1], "b")], World(0, 4)), grads, kept, "ab", strict=True
    ):
        assert call.layer == name
        assert call.out.data_ptr() == grad.data_ptr()
        assert call.tensor.data_ptr() != grad.data_ptr()
        assert torch.equal(call.tensor, old.view(-1) * (1 / 4))
        assert torch.equal(grad, old)
        assert call.wire_bytes(4) == grad.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_sum_of_large_gradients_does_not_overflow_for_they_are_divided_before(dtype: torch.dtype) -> None:
    large = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    for mean in exchange_once("none@push_pull", [large, large]):
        assert torch.equal(mean, large)


def test_what_is_pushed_lies_in_the_same_memory_in_every_step() -> None:
    one = item(torch.randn(5, 5))
    first = asked([one], World(0, 2))[0].tensor.data_ptr()
    one.arena.rewind()
    assert asked([one], World(0, 2))[0].tensor.data_ptr() == first


def test_a_rank_sends_the_gradient_once_however_many_there_are() -> None:
    spec = LayerSpec("x", (300, 64))
    assert {PushPullExchange().wire_bytes(make("none"), spec, world) for world in (1, 2, 64)} == {4.0 * 300 * 64}
    assert PushPullExchange().owned(make("none"), spec, World(0, 2)) is None


def test_codecs_and_dtypes_that_servers_do_not_add_up_are_refused() -> None:
    spec = LayerSpec("x", (8, 8))
    assert PushPullExchange().refuse(make("none"), spec) is None
    assert "as they are" in str(PushPullExchange().refuse(make("onebit"), spec))
    with pytest.raises(ValueError, match=r"onebit.* cannot go over push_pull: servers add up gradients as they are"):
        resolve("onebit@push_pull", 2)


def test_the_exchanges_name_alone_is_a_rule() -> None:
    assert str(resolve("push_pull", 2)) == str(resolve("none@push_pull", 3)) == "none@push_pull"
