"""Local steps between real ranks: all meet with the same bits, go on exactly, and what is wrong has a name."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commlib.errors import CheckpointMismatch, CommlibError, PlanMismatch
from commlib.groups.world import World
from commlib.local_sgd.local_steps import LocalSteps
from commlib.local_sgd.outer_optimizers import RULES
from tests.support.rank_pool import Fleet, RankFailed


def network(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)


def batch(step: int, world: World, rows: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """This rank's part of the examples of a step."""
    drawn = torch.Generator().manual_seed(step)
    x, y = (torch.randn(rows * world.size, n, generator=drawn).to(dtype) for n in (40, 3))
    part = slice(rows * world.rank, rows * (world.rank + 1))
    return x[part], y[part]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, steps: range, local: LocalSteps) -> None:
    for step in steps:
        x, y = batch(step, world)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        local.step()


def values(model: nn.Module) -> list[list[float]]:
    return [p.detach().reshape(-1).tolist() for p in model.parameters()]


def shared(local: LocalSteps) -> dict[str, Tensor]:
    return {n: t for f in local.state_dict()["fragments"] for n, t in f["values"]["shared"].items()}


def exchange(local: LocalSteps) -> str:
    return str([f["exchange"] for f in local.state_dict()["fragments"]])


def averaged_every_step(world: World) -> float:
    """How far from serial training with all examples, in float64."""
    model, serial = network(world.rank, torch.float64), network(0, torch.float64)
    local = LocalSteps(model, "average", tau=1)
    every = World(0, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01) for m in (model, serial)]
    for step in range(10):
        mine = batch(step, world, dtype=torch.float64)
        whole = batch(step, every, 8 * world.size, dtype=torch.float64)
        for m, optimizer, (x, y) in zip((model, serial), optimizers, (mine, whole), strict=True):
            optimizer.zero_grad()
            (m(x) - y).square().mean().backward()
            optimizer.step()
        local.step()
    local.close()
    pairs = zip(model.parameters(), serial.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_averaging_after_every_step_is_serial_training_with_local_momentum(fleet: Fleet, size: int) -> None:
    assert max(fleet.run(size, averaged_every_step)) < 1e-13


def after_meetings(world: World, rule: str) -> list[tuple[Any, Any, int]]:
    """By every codec, of different kinds."""
    found = []
    for codec in ("none", "onebit", "topk:ratio=0.1"):
        model = network(world.rank)  # another on each rank, until they begin
        local = LocalSteps(model, rule, codec, tau=3, min_size=64)
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), world, range(7), local)
        local.close()
        local.take_shared()
        found.append((values(model), [v.tolist() for v in shared(local).values()], local.meetings))
    return found


@pytest.mark.parametrize("rule", sorted(RULES))
def test_all_ranks_have_the_same_bits_after_a_meeting_whatever_the_codec(fleet: Fleet, rule: str) -> None:
    first, *others = fleet.run(2, after_meetings, rule)
    assert others == [first]
    for own, _, meetings in first:
        assert meetings == 3  # after steps 3 and 6, and when it ended
        assert all(torch.tensor(v).isfinite().all() for v in own)


def pulled(world: World) -> tuple[list[float], list[float], list[float]]:
    model = nn.Linear(3, 1, bias=False)
    local = LocalSteps(model, "elastic:alpha=0.25", tau=1)
    with torch.no_grad():
        model.weight.fill_(float(world.rank))
    before = shared(local)["weight"].reshape(-1).tolist()
    local.meet()
    after = shared(local)["weight"].reshape(-1).tolist()
    return before, after, model.weight.detach().reshape(-1).tolist()


def test_ranks_that_are_pulled_stay_apart_and_the_sum_with_the_centre_is_conserved(fleet: Fleet) -> None:
    found = fleet.run(2, pulled)
    (before, after, _), own = found[0], [f[2] for f in found]
    assert own[0] != own[1]
    assert [a + b + c for a, b, c in zip(*own, after, strict=True)] == pytest.approx([b + 0 + 1 for b in before])


def overflowed(world: World) -> tuple[bool, bool, int, list[Any], list[list[float]]]:
    model = network(0)
    local = LocalSteps(model, "diloco", "onebit", tau=1, min_size=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, world, range(2), local)
    held, kept = values(model), exchange(local)
    with torch.no_grad():
        first = next(model.parameters())
        first[0, 0] = float("nan") if world.rank == 1 else 3.0
    counted = local.meet()
    back, same = values(model), exchange(local) == kept
    train(model, optimizer, world, range(2, 4), local)
    return counted, same, local.refused, [held, back] if held != back else [], values(model)


def test_a_rank_that_is_not_finite_moves_nobody_and_leaves_no_trace(fleet: Fleet) -> None:
    found = fleet.run(2, overflowed)
    for counted, same, refused, moved, now in found:
        assert (counted, refused, moved) == (False, 1, [])
        assert same
        assert all(torch.tensor(v).isfinite().all() for v in now)
    assert found[0][4] == found[1][4]


STREAMING = {"tau": 4, "fragments": 2, "delay": 1}


def resumed(world: World, rule: str, options: dict[str, Any]) -> bool:
    """Whether a run that stops half-way between two meetings, or within one, goes on as one that does not."""
    ends = []
    for stops in (False, True):
        model = network(0)
        local = LocalSteps(model, rule, "onebit", min_size=64, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, world, range(6), local)
        if stops:
            saved = [model.state_dict(), optimizer.state_dict(), local.state_dict()]
            model = network(1)
            local = LocalSteps(model, rule, "onebit", min_size=64, **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            parts: list[Any] = [model, optimizer, local]
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)
        train(model, optimizer, world, range(6, 13), local)
        local.close()
        ends.append((values(model), local.steps, local.meetings))
    return ends[0] == ends[1]


@pytest.mark.parametrize(
    ("rule", "options"), [("diloco", {"tau": 4}), ("elastic", {"tau": 4}), ("bmuf", STREAMING)], ids=str
)
def test_a_run_goes_on_bit_for_bit(fleet: Fleet, rule: str, options: dict[str, Any]) -> None:
    assert fleet.run(2, resumed, rule, options) == [True, True]


def unlike(world: World, what: str) -> str:
    both: Any = {"tau": (2, 3), "rule": ("average", "diloco")}[what]
    try:
        LocalSteps(network(0), **{what: both[world.rank]})
    except PlanMismatch as e:
        return str(e)
    return "nothing"


@pytest.mark.parametrize("what", ["tau", "rule"])
def test_ranks_that_would_do_something_else_are_told_so(fleet: Fleet, what: str) -> None:
    assert all(what in said for said in fleet.run(2, unlike, what))


def bad_arguments(world: World) -> list[str]:
    model = network(0)
    calls: list[Any] = [
        lambda: LocalSteps(DistributedDataParallel(model)),
        lambda: LocalSteps(model, tau=0),
        lambda: LocalSteps(model, "avrage"),
        lambda: LocalSteps(model, "elastic:alpha=2"),
        lambda: LocalSteps(model, compressor="auto"),
        lambda: LocalSteps(model, tau=5, delay=5),
        lambda: LocalSteps(model, mix=1.0),
        lambda: LocalSteps(model, tau="auto", delay=1),
        lambda: LocalSteps(model, "elastic", delay=1),
        lambda: LocalSteps(model, fragments=3),
    ]
    said = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as e:
            call()
        said.append(str(e.value))
    return said


def test_bad_arguments_are_told_by_what_is_wrong_with_them(fleet: Fleet) -> None:
    wrapped, tau, rule, alpha, policy, *streaming = fleet.run(1, bad_arguments)[0]
    assert "wrapped in DDP" in wrapped
    assert "tau is 1 step or more, got 0" in tau
    assert "did you mean 'average'" in rule
    assert "alpha must be below" in alpha
    assert "name a codec" in policy
    wanted = ["less than tau=5, got 5", "mix must be in [0, 1)", "fragments and delay need a number", "has no delay"]
    for said, what in zip(streaming, [*wanted, "cut in 1 to 2 fragments, not 3"], strict=True):
        assert what in said


def misused(world: World) -> tuple[str, str]:
    model = network(0)
    local, other = LocalSteps(model, tau=2), LocalSteps(network(0), tau=3)
    with pytest.raises(CheckpointMismatch) as mismatch:
        other.load_state_dict(local.state_dict())
    local.close()
    local.close()
    with pytest.raises(CommlibError) as closed:
        local.step()
    other.close()
    return str(mismatch.value), str(closed.value)


def test_another_tau_in_a_checkpoint_and_what_is_closed_are_told(fleet: Fleet) -> None:
    mismatch, closed = fleet.run(1, misused)[0]
    assert "this run has tau 3, and the checkpoint is of 2" in mismatch
    assert "has been closed" in closed


def alone(world: World) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))  # for what both make, too
    local = LocalSteps(network(0), tau=1, timeout=20, process_group=group)
    if world.rank == 0:
        local.meet()


def test_nobody_waits_for_ever_for_a_rank_that_does_not_come(fleet: Fleet) -> None:
    with pytest.raises(RankFailed, match="PeerLost"):
        fleet.run(2, alone)
