"""A model that is all gradient: which gradients, in which order, how long it takes, and what DDP makes of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.bench.models.simulated import Replay
from commlib.groups.world import World
from tests.support.rank_pool import Fleet

SHAPES = [
    ("layer1.0.conv.weight", (8, 4, 3, 3)),
    ("layer1.0.conv.bias", (8,)),
    ("scale", ()),
    ("head.weight", (300, 200)),
]


def test_parameters_have_the_names_and_shapes_asked_for() -> None:
    model = Replay(SHAPES)
    # A module's own parameters come before those of its children, as in any module.
    assert sorted((n, tuple(p.shape)) for n, p in model.named_parameters()) == sorted(SHAPES)
    assert list(model.buffers()) == []  # DDP would broadcast them


def test_backward_hands_out_the_prepared_gradients_in_reverse_order() -> None:
    model = Replay(SHAPES)
    ready: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: ready.append(name))
    loss = model()
    assert loss.shape == ()
    assert loss.item() == 0.0
    loss.backward()
    assert ready == [name for name, _ in reversed(SHAPES)]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, model.gradient(name))  # type: ignore[arg-type]


def test_gradients_taken_back_come_again_at_the_same_place_whatever_was_written_there() -> None:
    model = Replay(SHAPES)
    model().backward()
    places = {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None}
    for _ in range(3):
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        model.take_back()
        assert all(p.grad is None for p in model.parameters())
        model().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == places[name]
            assert torch.equal(parameter.grad, model.gradient(name))


def test_whoever_writes_into_a_gradient_does_not_change_the_next_one() -> None:
    model = Replay(SHAPES)
    before = {name: model.gradient(name).clone() for name, _ in SHAPES}
    model().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    model.zero_grad()
    model().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, before[name])  # type: ignore[arg-type]


def test_a_model_that_moves_takes_its_gradients_along() -> None:
    model = Replay(SHAPES).to(torch.float64)
    model().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float64
        assert torch.equal(parameter.grad, model.gradient(name))


def test_gradients_differ_from_parameter_to_parameter_and_by_seed() -> None:
    same = [("a", (50, 50)), ("b", (50, 50))]
    model = Replay(same)
    assert not torch.equal(model.gradient("a"), model.gradient("b"))
    assert torch.equal(model.gradient("a"), Replay(same).gradient("a"))
    assert not torch.equal(model.gradient("a"), Replay(same, seed=1).gradient("a"))
    assert 0.9 < model.gradient("a").std() < 1.1


@pytest.mark.alone
def test_the_backward_pass_takes_its_time_and_leaves_the_core_alone() -> None:
    model = Replay([(f"{i}.weight", (100, 100)) for i in range(200)], backward_s=0.5)  # 2.5 ms each
    loss = model()
    start, busy = time.perf_counter(), time.thread_time()
    loss.backward()
    seconds, busy = time.perf_counter() - start, time.thread_time() - busy
    assert 0.49 < seconds < 3.0
    assert busy < 0.25


@pytest.mark.alone
def test_sleeps_too_short_for_the_system_add_up() -> None:
    model = Replay([(f"{i}.weight", (10,)) for i in range(1000)], backward_s=0.05)  # 50 µs each
    start = time.perf_counter()
    model().backward()
    assert 0.049 < time.perf_counter() - start < 2.0


@pytest.mark.parametrize(
    ("shapes", "options", "said"),
    [
        ([], {}, "without parameters"),
        ([("a.b", (2,)), ("a.b", (2,))], {}, "two parameters are called 'a.b'"),
        ([("a", (2,)), ("a.b", (2,))], {}, "no module can have a parameter called 'a.b'"),
        ([("", (2,))], {}, "no module can have a parameter called ''"),
        ([("a..b", (2,))], {}, "no module can have"),
        ([("a", (2,))], {"backward_s": -1.0}, "backward_s must be"),
    ],
)
def test_what_cannot_be_is_refused(shapes: Any, options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Replay(shapes, **options)


def averaged(world: World, as_view: bool, codec: str | None) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(prepared, averaged) gradients by name, of three DDP steps."""
    model = Replay(SHAPES)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=as_view, init_sync=False, bucket_cap_mb=0.01)
    if codec is not None:
        commlib.attach(ddp, codec)
    steps = []
    for _ in range(3):  # DDP rearranges its buckets after the first
        model.zero_grad()
        ddp().backward()
        result = {n: p.grad.clone() for n, p in model.named_parameters()}  # type: ignore[union-attr]
        steps.append(({n: model.gradient(n).clone() for n, _ in SHAPES}, result))
    return steps


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("codec", [None, "none@dense"])
def test_under_ddp_every_step_gives_the_mean_over_the_ranks(fleet: Fleet, as_view: bool, codec: str | None) -> None:
    ranks = fleet.run(2, averaged, as_view, codec)
    for a, b in zip(*ranks, strict=True):
        for name, shape in SHAPES:
            if shape != ():
                assert not torch.equal(a[0][name], b[0][name])
            mean = (a[0][name] + b[0][name]) / 2
            torch.testing.assert_close(a[1][name], mean)
            assert torch.equal(a[1][name], b[1][name])


def with_rows(world: World, rule: str) -> tuple[float, list[str]]:
    shapes = [("a.weight", (48, 64)), ("a.bias", (48,)), ("conv.weight", (8, 4, 3, 3)), ("b.weight", (40, 48))]
    model = Replay(shapes, rows={"a": 6, "b": 5})
    ddp = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=0.01)
    comm = commlib.attach(ddp, rule)
    worst = 0.0
    for _ in range(3):
        ddp.zero_grad()
        ddp().backward()
        for name, parameter in model.named_parameters():
            mean = model.gradient(name).clone()
            dist.all_reduce(mean)
            mean /= world.size
            assert parameter.grad is not None
            worst = max(worst, float((parameter.grad - mean).abs().max() / mean.abs().max()))
    comm.close()
    sent = [name for name, layer in comm.stats().layers.items() if layer.wire_bytes < layer.dense_bytes]
    return worst, sent


@pytest.mark.parametrize(("rule", "fewer"), [("none", []), ("factors", ["a.weight", "b.weight"])])
def test_linear_layers_hand_out_the_rows_their_gradient_is_made_of(fleet: Fleet, rule: str, fewer: list[str]) -> None:
    for worst, sent in fleet.run(2, with_rows, rule):
        assert worst < 2e-6
        assert set(fewer) <= set(sent)
        assert "conv.weight" not in sent
