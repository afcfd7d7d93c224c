"""Layers that are coded as one leave the bits that they leave one by one: weights, residuals, a named fault."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.codecs.base import LayerSpec
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.slots import Memory
from commlib.compressors.fp16 import Float16
from commlib.ddp.buckets import BucketPlanner
from commlib.exchange import chunking
from commlib.exchange.buffers import StepBuffers
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full

WIDTH = 11  # odd sizes: no layer begins at a multiple of 8 bytes


def model(permuted: bool) -> nn.Module:
    torch.manual_seed(0)
    last = nn.Linear(27, 5)
    if permuted:
        last.weight = nn.Parameter(last.weight.detach().t().contiguous().t())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Conv1d(1, 3, 3), nn.Flatten(), last)


class Sizes(list[int]):
    """How many layers each task of a step had."""

    def __init__(self, comm: commlib.HookState) -> None:
        super().__init__()
        self._make, buckets = comm._buckets._as_one, vars(comm._buckets)
        buckets["_as_one"] = self

    def __call__(self, *args: Any) -> Any:
        task = self._make(*args)
        self.append(len(task.layers))
        return task


def course(
    world: World, rule: Any, alone: bool, options: dict[str, Any], permuted: bool, part: int = chunking.SIZE
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[int], int]:
    """Weights and what is held back, by name, after some steps; sizes of runs; bytes."""
    ddp = DistributedDataParallel(model(permuted), bucket_cap_mb=0.001)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "SIZE", part)
        if alone:
            patch.setattr(BucketPlanner, "_in_runs", lambda self: False)
        comm = commlib.attach(ddp, rule, **options)
        sizes, optimizer = Sizes(comm), torch.optim.SGD(ddp.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(world.rank)
        for step in range(6):
            x = torch.randn(4, 1, WIDTH, generator=generator)
            if step == 3 and world.rank == 1:
                x[0] = float("inf")  # forgotten, residuals and all
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            if step != 3:
                optimizer.step()
        held = {f"{name} {key}": value.clone() for name, key, value in comm._store.held()}
        sent = comm.stats().wire_bytes
        comm.detach()
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}, held, list(sizes), sent


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


CASES: list[Any] = [
    ("fp16", {}, False),
    ("bf16:ef=off", {"dense_steps": 1, "verify": 2}, False),
    *full(
        ("fp16:ef=0.9", {"verify": 1}, False),
        ("fp16", {}, True),
        ("bf16", {"check_replicas": 1}, False),
        ({"0.*": "fp16", "2.*": "bf16", "4.*": "fp16"}, {"min_size": 0}, False),
    ),
]


@pytest.mark.parametrize(("rule", "options", "permuted"), CASES, ids=str)
def test_weights_and_residuals_are_those_of_layers_one_by_one(
    fleet: Fleet, rule: Any, options: dict[str, Any], permuted: bool
) -> None:
    """Of two ranks: more are added in an order that follows from the place in the buffer, so are rounded otherwise."""
    runs, layers = (fleet.run(2, course, rule, alone, options, permuted) for alone in (False, True))
    for (weights, held, sizes, sent), (weights_1, held_1, sizes_1, sent_1) in zip(runs, layers, strict=True):
        assert same(weights, weights_1)
        assert same(held, held_1)
        assert bool(held) == ("ef=off" not in str(rule))
        assert max(sizes) >= 2
        assert sizes_1 == []
        assert sent <= sent_1  # no layer is padded to a multiple of 8 bytes


def test_a_large_run_travels_in_parts(fleet: Fleet) -> None:
    options = {"verify": 2}
    runs, layers = (fleet.run(2, course, "fp16", alone, options, False, 200) for alone in (False, True))
    for (weights, held, sizes, sent), (weights_1, held_1, *_) in zip(runs, layers, strict=True):
        assert same(weights, weights_1)
        assert same(held, held_1)
        assert max(sizes) >= 2
        assert sent > 0


@pytest.mark.full
@pytest.mark.parametrize(("rule", "options", "permuted"), CASES, ids=str)
def test_replicas_of_three_ranks_are_equal_and_near_those_of_layers_one_by_one(
    fleet: Fleet, rule: Any, options: dict[str, Any], permuted: bool
) -> None:
    runs, layers = (fleet.run(3, course, rule, alone, options, permuted) for alone in (False, True))
    for (weights, held, sizes, _), (weights_1, held_1, *_) in zip(runs, layers, strict=True):
        assert same(weights, runs[0][0])
        assert max(sizes) >= 2
        assert held.keys() == held_1.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, weights_1[name], rtol=0, atol=2e-2)


def memory(world: World) -> list[int]:
    """Bytes of buffers after some steps; and after so many of a second attaching, to buckets that stay as they are."""
    ddp, found = DistributedDataParallel(model(False), bucket_cap_mb=0.001), []
    for _ in range(2):
        comm = commlib.attach(ddp, "fp16:ef=off")
        for _ in range(6):
            ddp.zero_grad()
            ddp(torch.ones(4, 1, WIDTH)).square().mean().backward()
        gc.collect()
        made = [t for each in gc.get_objects() if isinstance(each, StepBuffers) for t in each._made]
        found.append(sum({t.data_ptr(): t.nbytes for t in made}.values()))
        comm.detach()
        del comm, made
    return found


def test_buffers_of_runs_of_before_ddp_filled_its_buckets_anew_are_freed(fleet: Fleet) -> None:
    for first, second in fleet.run(2, memory):
        assert first == second > 0


def moved(world: World) -> list[bool]:
    """Whether residuals are what they were after other routes, and back; and after a checkpoint."""
    ddp = DistributedDataParallel(model(False))
    comm = commlib.attach(ddp, "bf16")

    def step() -> None:
        ddp.zero_grad()
        generator = torch.Generator().manual_seed(world.rank)
        ddp(torch.randn(4, 1, WIDTH, generator=generator)).square().mean().backward()

    def held() -> dict[str, Tensor]:
        comm.stats()
        return {name: value.clone() for name, _, value in comm._store.held()}

    for _ in range(2):
        step()
    saved, before = comm.state_dict(), held()
    comm.swap({"0.*": "fp16", "*": "bf16"})  # other runs, of the same residuals
    kept = same(before, held())
    step()
    after = held()
    comm.load_state_dict(saved)
    loaded = same(before, held())
    comm.swap("none")  # what is held back is sent
    step()
    none = held()
    comm.close()
    return [kept, loaded, not same(before, after), len(before) == 6, not none]


def test_residuals_survive_another_plan_and_a_checkpoint_and_are_sent_by_a_plan_without_codecs(fleet: Fleet) -> None:
    assert fleet.run(2, moved) == [[True] * 5] * 2


class Loses(Float16):
    """``fp16`` that adds to the last value of whatever it is given."""

    def encode_feedback(self, x: Tensor, carry: Any, payload: Tensor, *, memory: Memory, seed: int) -> None:
        super().encode_feedback(x, carry, payload, memory=memory, seed=seed)
        carry.new.view(-1)[-1] += 1e3


def lost(world: World) -> str:
    ddp = DistributedDataParallel(model(False))
    comm = commlib.attach(ddp, commlib.Route("dense", ErrorFeedback(Loses())), verify=1)
    try:
        for _ in range(2):
            ddp(torch.randn(4, 1, WIDTH)).square().mean().backward()
    except commlib.WrongGradient as e:
        return str(e)
    finally:
        comm.close()
    return ""


def test_a_codec_that_loses_a_value_of_a_run_is_told_the_layer_it_is_of(fleet: Fleet) -> None:
    for said in fleet.run(2, lost):
        assert said.startswith("4.bias: fp16 was given")


def test_by_default_fp16_and_bf16_take_every_layer_and_others_the_large_ones() -> None:
    assert [Float16.min_size, ErrorFeedback(Float16()).min_size] == [0, 0]
    specs = [LayerSpec("w", (64, 64)), LayerSpec("b", (64,))]
    from commlib.planning.planner import make_plan

    def routes(rule: str, min_size: int | None) -> list[str]:
        return [str(p.route) for p in make_plan(specs, rule, world=2, min_size=min_size)]

    assert routes("fp16", None) == ["fp16@dense", "fp16@dense"]
    assert routes("fp16", 1024) == ["fp16@dense", "none@dense"]
    assert routes("int8", None) == ["int8@gather", "none@dense"]
