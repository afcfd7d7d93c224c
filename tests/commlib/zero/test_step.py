"""A sharded step between real ranks: DDP's training with a part of its state, exact to save and to resume."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from commlib.checkpoint import merge_state_dicts
from commlib.errors import CheckpointMismatch, CommlibError, PeerLost, PlanMismatch
from commlib.groups.world import World
from commlib.zero.partition import buckets_of, plan_of, wire_bytes
from commlib.zero.step import ShardedStep
from tests.support.rank_pool import Fleet, RankFailed

Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
}
SMALL = 2000  # bytes of a bucket: several


class Network(nn.Module):
    """With a scalar parameter, a layer that some steps do not use, and one that none does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(13, 31), nn.Linear(31, 3)
        self.now_and_then, self.never = nn.Linear(31, 3), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        out: Tensor = self.second(hidden)
        return out + self.now_and_then(hidden) if more else out


def loss_of(model: nn.Module, world: World, step: int) -> Tensor:
    drawn = torch.Generator().manual_seed(100 * step + world.rank)
    x, y = torch.randn(8, 13, generator=drawn), torch.randn(8, 3, generator=drawn)
    found: Tensor = (model(x, step % 3 == 1 and world.rank == 0) - y).square().mean()
    return found


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two, so that options differ."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for p in named.values() if p.dim() > 1]},
        {"params": [p for p in named.values() if p.dim() <= 1], "lr": 0.02},
    ]


def sharded_run(
    world: World, model: nn.Module, optimizer: Optimizer, steps: range, clip: float | None, **options: Any
) -> ShardedStep:
    sharded = ShardedStep(model, optimizer, nbytes=SMALL, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if clip else None
    go_on(world, model, optimizer, sharded, steps, clip, schedule)
    return sharded


def go_on(
    world: World,
    model: nn.Module,
    optimizer: Optimizer,
    sharded: ShardedStep,
    steps: range,
    clip: float | None = None,
    schedule: Any = None,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, world, step).backward()
        if clip:
            sharded.clip_grad_norm_(clip)
        assert sharded.step()
        if schedule:
            schedule.step()


def ddp_run(world: World, make: Make, steps: range, clip: float | None) -> tuple[nn.Module, Optimizer]:
    model = Network(0)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = make(groups(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if clip else None
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, world, step).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule:
            schedule.step()
    return model, optimizer


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def as_ddp(world: World, names: list[str]) -> dict[str, tuple[Any, ...]]:
    """By optimizer: distance to DDP; values; distance of the states; what of the state this rank has."""
    found: dict[str, tuple[Any, ...]] = {}
    warnings.simplefilter("error", UserWarning)  # a scheduler's, that nobody steps its optimizer
    for name in names:
        clip = 0.3 if name in ("sgd", "adamw") else None
        wanted, stock = ddp_run(world, OPTIMIZERS[name], range(6), clip)
        model = Network(world.rank)  # another on each rank, until they begin
        optimizer = OPTIMIZERS[name](groups(model))
        sharded = sharded_run(world, model, optimizer, range(6), clip)
        whole = sharded.state_dict()
        apart = max(float((a - b).abs().max()) for a, b in zip(values(model), values(wanted), strict=True))
        there = stock.state_dict()
        assert whole["param_groups"] == there["param_groups"]
        assert {i: sorted(s) for i, s in whole["state"].items()} == {i: sorted(s) for i, s in there["state"].items()}
        off = max(
            float((torch.as_tensor(value) - torch.as_tensor(there["state"][i][key])).abs().max())
            for i, state in whole["state"].items()
            for key, value in state.items()
        )
        kept = sum(
            v.numel()
            for parts in sharded._parts
            for n in parts.by_name
            for v in parts.state(n).values()
            if isinstance(v, Tensor) and v.dim() == 1
        )
        all_ = sum(v.numel() for s in there["state"].values() for v in s.values() if isinstance(v, Tensor) and v.dim())
        sharded.close()
        found[name] = (apart, values(model), off, kept / all_)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_training_is_that_of_ddp_with_the_same_optimizer_and_a_part_of_its_state(fleet: Fleet, size: int) -> None:
    names = list(OPTIMIZERS) if size == 2 else ["sgd", "adamw"]
    found = fleet.run(size, as_ddp, names)
    for name in names:
        for apart, model, off, kept in (rank[name] for rank in found):
            assert apart < 2e-6, name
            assert off < 2e-6, name
            assert kept == pytest.approx(1 / size, abs=0.05), name
            assert all(torch.equal(a, b) for a, b in zip(model, found[0][name][1], strict=True))


def bit_for_bit(world: World) -> bool:
    """Without clipping, whose norm is added in another order."""
    same = []
    for name in ("sgd", "adamw"):
        wanted, _ = ddp_run(world, OPTIMIZERS[name], range(6), None)
        model = Network(1)
        model.load_state_dict(Network(0).state_dict())
        sharded_run(world, model, OPTIMIZERS[name](groups(model)), range(6), None).close()
        same.append(all(torch.equal(a, b) for a, b in zip(values(model), values(wanted), strict=True)))
    return all(same)


def test_between_two_ranks_it_is_ddp_to_the_last_bit(fleet: Fleet) -> None:
    assert fleet.run(2, bit_for_bit) == [True, True]


def saved(world: World, codec: str) -> tuple[Any, Any, Any, Any]:
    """Model, optimizer and residuals after 4 steps; and the model after 4 more."""
    model = Network(0)
    optimizer = OPTIMIZERS["adamw"](groups(model))
    sharded = sharded_run(world, model, optimizer, range(4), None, compressor=codec, min_size=8)
    states = {k: v.clone() for k, v in model.state_dict().items()}, sharded.state_dict(), sharded.residuals()
    go_on(world, model, optimizer, sharded, range(4, 8))
    sharded.close()
    return *states, values(model)


def resumed(world: World, codec: str, model_state: Any, optimizer_state: Any, residuals: Any) -> list[Tensor]:
    model = Network(5)
    optimizer = OPTIMIZERS["adamw"](groups(model))
    sharded = ShardedStep(model, optimizer, codec, nbytes=SMALL, min_size=8)
    model.load_state_dict(model_state)
    sharded.load_state_dict(optimizer_state)
    sharded.load_residuals(residuals)
    assert sharded.steps == 4
    go_on(world, model, optimizer, sharded, range(4, 8))
    sharded.close()
    return values(model)


def alone(world: World, model_state: Any, optimizer_state: Any) -> list[Tensor]:
    """One process with a plain optimizer, which computes both ranks' gradients."""
    model = Network(9)
    model.load_state_dict(model_state)
    optimizer = OPTIMIZERS["adamw"](groups(model))
    optimizer.load_state_dict(optimizer_state)
    for step in range(4, 8):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, World(rank, 2), step) / 2).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("codec", ["none", "onebit"])
def test_any_ranks_checkpoint_goes_on_bit_for_bit_and_elsewhere(fleet: Fleet, codec: str) -> None:
    ranks = fleet.run(2, saved, codec)
    (model, state, _, end), (other_model, other, _, _) = ranks
    assert all(torch.equal(model[k], other_model[k]) for k in model)
    assert str(other) == str(state)
    residuals = merge_state_dicts([r[2] for r in ranks])
    for mine in fleet.run(2, resumed, codec, model, other, residuals):
        assert all(torch.equal(a, b) for a, b in zip(mine, end, strict=True))
    three = fleet.run(3, resumed, codec, model, state, residuals)
    assert all(torch.equal(a, b) for rank in three for a, b in zip(rank, three[0], strict=True))
    assert all(torch.isfinite(v).all() for v in three[0])
    if codec == "none":
        plain = fleet.run(1, alone, model, state)[0]
        assert max(float((a - b).abs().max()) for a, b in zip(plain, end, strict=True)) < 2e-6


def counted(world: World, codec: str) -> tuple[float, float, int]:
    """Bytes that were sent in 3 steps, and what the formula says; bytes held, less what the plan says."""
    model = Network(0)
    sharded = sharded_run(world, model, OPTIMIZERS["sgd"](groups(model)), range(3), None, compressor=codec, min_size=8)
    specs = [p.spec for p in plan_of([p.spec for p in sharded.plan], codec, world=world.size, min_size=8)]
    assert [s.name for s in specs] == [p.spec.name for p in sharded.plan]
    buckets = buckets_of(sharded.plan, SMALL)
    sent, held = sharded.stats.wire_bytes, sharded.stats.memory
    assert held is not None
    sharded.close()
    verdict = (world.size - 1) * (8 + sum(len(cuts) for cuts in buckets))  # what a rank sends to agree on a step
    more = held.residuals + held.state - sharded.plan.held_bytes
    return sent, 3 * (wire_bytes(buckets, world.rank, world.size) + verdict), more


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_bytes_are_those_of_the_formula_and_memory_is_what_the_plan_says(fleet: Fleet, codec: str) -> None:
    for sent, wanted, more in fleet.run(3, counted, codec):
        assert sent == pytest.approx(wanted)
        assert more == 0


def overflowed(world: World, codec: str) -> tuple[Any, ...]:
    """With a step that is not finite on one rank, and without it."""
    ends = []
    for bad in (True, False):
        model = Network(0)
        optimizer = OPTIMIZERS["adamw"](groups(model))
        sharded = ShardedStep(model, optimizer, codec, nbytes=SMALL, min_size=8)
        go_on(world, model, optimizer, sharded, range(2))
        if bad:
            optimizer.zero_grad()
            loss = loss_of(model, world, 2)
            (loss * float("inf") if world.rank == 1 else loss).backward()
            assert not sharded.step()
        go_on(world, model, optimizer, sharded, range(2, 5))
        ends.append((values(model), sharded.steps, sharded.refused))
        sharded.close()
    return ends[0], ends[1]


@pytest.mark.parametrize("codec", ["none", "onebit"])
def test_a_step_that_is_not_finite_has_never_been(fleet: Fleet, codec: str) -> None:
    for with_it, without in fleet.run(2, overflowed, codec):
        assert (with_it[1:], without[1:]) == ((5, 1), (5, 0))
        assert all(torch.equal(a, b) for a, b in zip(with_it[0], without[0], strict=True))


def scaled(world: World) -> tuple[float, list[float], list[int]]:
    """Distance to training without a loss scale; the scale after each step; steps that count, and that do not."""
    plain, model = Network(0), Network(0)
    first = OPTIMIZERS["sgd"](groups(plain))
    sharded_run(world, plain, first, range(4), None).close()
    optimizer = OPTIMIZERS["sgd"](groups(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    sharded = ShardedStep(model, optimizer, scaler=scaler, nbytes=SMALL)
    scales = []
    for step in (0, 1, -1, 2, 3):
        optimizer.zero_grad()
        loss = loss_of(model, world, max(step, 0))
        scaler.scale(loss * (1e38 if step < 0 and world.rank == 1 else 1)).backward()
        sharded.step()
        scaler.update()
        scales.append(scaler.get_scale())
    optimizer.zero_grad()
    scaler.scale(loss_of(model, world, 4)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(CommlibError, match="leave it out"):
        sharded.step()
    sharded.close()
    apart = max(float((a - b).abs().max()) for a, b in zip(values(model), values(plain), strict=True))
    return apart, scales, [sharded.steps, sharded.refused]


def test_a_scaler_hears_of_an_overflow_on_any_rank(fleet: Fleet) -> None:
    for apart, scales, counts in fleet.run(2, scaled):
        assert apart < 1e-6
        assert scales == [1024, 1024, 512, 512, 512]
        assert counts == [4, 1]


def accumulated(world: World) -> tuple[float, str, str, str]:
    """Distance between two half steps in one, and DDP's; then what a second pass, a stranger and the end are told."""
    model, ddp_model = Network(0), Network(0)
    ddp = DistributedDataParallel(ddp_model, find_unused_parameters=True)
    optimizers = [OPTIMIZERS["sgd"](groups(m)) for m in (model, ddp_model)]
    sharded = ShardedStep(model, optimizers[0], nbytes=SMALL)
    for step in (1, 4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for trained, whole in ((model, sharded), (ddp, ddp)):
            with whole.no_sync():
                loss_of(trained, world, step).backward()
            loss_of(trained, world, step + 1).backward()
        sharded.step()
        optimizers[1].step()
    apart = max(float((a - b).abs().max()) for a, b in zip(values(model), values(ddp_model), strict=True))
    with pytest.raises(CommlibError) as stepped:
        optimizers[0].step()
    layer = nn.Linear(13, 3)  # all of it has a gradient, which leaves at once
    other = ShardedStep(layer, OPTIMIZERS["sgd"](layer.parameters()))
    layer(torch.ones(13)).sum().backward()
    with pytest.raises(CommlibError) as twice:
        layer(torch.ones(13)).sum().backward()
    other.close()
    sharded.close()
    sharded.close()
    with pytest.raises(CommlibError) as closed:
        sharded.step()
    return apart, str(stepped.value), str(twice.value), str(closed.value)


def test_gradients_accumulate_and_what_is_misused_is_told(fleet: Fleet) -> None:
    for apart, stepped, twice, closed in fleet.run(2, accumulated):
        assert apart < 1e-6
        assert "call step() of the ShardedStep, not optimizer.step()" in stepped
        assert "no_sync()" in twice
        assert "has been closed" in closed


class OfItsOwn(torch.optim.SGD):
    """Some other optimizer."""


def bad_arguments(world: World) -> list[str]:
    model = Network(0)
    scattered: Any = nn.Conv2d(3, 4, 3)
    scattered.to(memory_format=torch.channels_last)
    sgd = OPTIMIZERS["sgd"]
    calls: list[Any] = [
        lambda: ShardedStep(DistributedDataParallel(model), sgd(model.parameters())),
        lambda: ShardedStep(model, OfItsOwn(model.parameters())),
        lambda: ShardedStep(model, torch.optim.Adafactor(model.parameters())),
        lambda: ShardedStep(model, sgd([model.scale])),
        lambda: ShardedStep(model, sgd(Network(0).parameters())),
        lambda: ShardedStep(scattered, sgd(scattered.parameters())),
        lambda: ShardedStep(model, sgd(model.parameters()), nbytes=-1),
        lambda: ShardedStep(model, sgd(model.parameters()), scaler="yes"),
        lambda: ShardedStep(model, sgd(model.parameters()), "dgc"),
    ]
    said = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as e:
            call()
        said.append(str(e.value))
    sharded = ShardedStep(model, sgd(model.parameters()))
    with pytest.raises(ValueError, match="max_norm"):
        sharded.clip_grad_norm_(0.0)
    states: list[Any] = [{}, {"state": {99: {}}, "param_groups": []}, {"state": {}, "param_groups": []}]
    for bad in states:
        with pytest.raises(CheckpointMismatch) as mismatch:
            sharded.load_state_dict(bad)
        said.append(str(mismatch.value))
    state = sharded.state_dict()
    with pytest.raises(CheckpointMismatch) as mismatch:
        sharded.load_state_dict({**state, "state": {0: {"momentum_buffer": torch.zeros(7)}}})
    sharded.close()
    return [*said, str(mismatch.value)]


def test_bad_arguments_are_told_by_what_is_wrong_with_them(fleet: Fleet) -> None:
    said = fleet.run(1, bad_arguments)[0]
    words = (
        *("wrapped in DDP", "OfItsOwn is not known", "Adafactor is not known"),
        *("the optimizer lacks", "the optimizer lacks"),
        *("one row of memory", "nbytes must be", "must be a torch.amp.GradScaler", "cannot re-encode"),
        *("no state dict of an optimizer", "state of parameter 99", "of another optimizer", "has shape (7,)"),
    )
    for text, wanted in zip(said, words, strict=True):
        assert wanted in text


def unlike(world: World) -> str:
    model = Network(0)
    made = (OPTIMIZERS["sgd"], OPTIMIZERS["adamw"])[world.rank]
    with pytest.raises(PlanMismatch) as e:
        ShardedStep(model, made(model.parameters()))
    return str(e.value)


def test_ranks_with_other_optimizers_are_told_so(fleet: Fleet) -> None:
    assert all("SGD" in said and "AdamW" in said for said in fleet.run(2, unlike))


def left(world: World) -> None:
    """The last rank does not come to the first step, and goes."""
    model = Network(0)
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))  # for what both make, too
    sharded = ShardedStep(model, OPTIMIZERS["sgd"](model.parameters()), nbytes=SMALL, process_group=group)
    if world.rank == world.size - 1:
        return
    loss_of(model, world, 0).backward()
    with pytest.raises(PeerLost) as e:
        sharded.step()
    assert "gradients of bucket 0 of step 0" in str(e.value)
    assert f"rank {world.size - 1} did not answer" in str(e.value)
    sharded.close()
    raise RuntimeError("as it should be")


def test_a_rank_that_does_not_come_is_named(fleet: Fleet) -> None:
    with pytest.raises(RankFailed, match="as it should be"):
        fleet.run(2, left)
