"""Placed layers between real ranks: what plain DDP does, by other ways; and what is wrong has a name."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commlib
from commlib.errors import PlanMismatch
from commlib.groups.world import World
from commlib.placement.linear import PlacedLinear, placed_layers
from commlib.placement.state_dict import (
    clip_grad_norm_,
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)
from tests.support.rank_pool import Fleet, RankFailed
from tests.support.tiers import full

WIDTHS = (11, 13)  # no number of ranks divides them


class Net(nn.Module):
    """Three linear layers, the second without a bias and called twice if told so."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(WIDTHS[0], WIDTHS[1]), nn.LayerNorm(WIDTHS[1])
        self.middle = nn.Linear(WIDTHS[1], WIDTHS[1], bias=False)
        self.last = nn.Linear(WIDTHS[1], 2)
        self.twice = self.recomputed = False
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for _ in range(2 if self.twice else 1):
            again: Any = checkpoint(self.middle, x, use_reentrant=False) if self.recomputed else self.middle(x)
            x = torch.tanh(again)
        y: Tensor = self.last(x)
        return y


def batch(step: int, world: World, dtype: torch.dtype, *, uneven: bool) -> tuple[Tensor, Tensor]:
    """This rank's; uneven: rank 0 has none of them in the first step."""
    rows = 4 + ((world.rank + step) % 3 if uneven else 0) - (4 if uneven and step == 0 and world.rank == 0 else 0)
    drawn = torch.Generator().manual_seed(100 * step + world.rank)
    return (
        torch.randn(rows, 3, WIDTHS[0], generator=drawn).to(dtype),
        torch.randn(rows, 3, 2, generator=drawn).to(dtype),
    )


OPTIMIZERS: Any = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}
CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw": {"optimizer": "adamw"},
    "uneven": {"uneven": True},
    "twice": {"twice": True},
    "recomputed": {"recomputed": True},
    "accumulated": {"accumulated": 2},
    "clipped": {"clip": 0.05},
    "attached": {"attach": "none"},
    "factors": {"which": ["first"], "attach": "factors"},
    "bfloat16": {"amp": True},
    "fp16": {"codec": "fp16", "most": 0.01},
    "int8": {"codec": "int8", "most": 0.1, "uneven": True},
    "drawn": {"codec": "qsgd:levels=127", "most": 0.2, "recomputed": True},
}


def train(model: nn.Module, world: World, dtype: torch.dtype, placed: bool, **case: Any) -> list[float]:
    """Losses of some steps."""
    if placed:
        commlib.place(model, case.get("which", "*"), codec=case.get("codec", "none"))
    model.twice, model.recomputed = case.get("twice", False), case.get("recomputed", False)
    ddp = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[case.get("optimizer", "sgd")](ddp.parameters())
    comm = commlib.attach(ddp, case["attach"]) if placed and "attach" in case else None
    losses, every = [], case.get("accumulated", 1)
    for step in range(4):
        x, y = batch(step, world, dtype, uneven=case.get("uneven", False))
        silent = contextlib.nullcontext() if (step + 1) % every == 0 else ddp.no_sync()
        with silent, torch.autocast("cpu", torch.bfloat16, enabled=case.get("amp", False)):
            loss = (ddp(x) - y).square().sum() / 12
            loss.backward()
        losses.append(loss.item())
        if (step + 1) % every == 0:
            if "clip" in case:
                own: Any = clip_grad_norm_ if placed else lambda m, n: nn.utils.clip_grad_norm_(m.parameters(), n)
                losses.append(float(own(ddp, case["clip"])))
            optimizer.step()
            optimizer.zero_grad()
    if comm is not None:
        comm.close()
    return losses


def beside_ddp(world: World, names: list[str]) -> list[tuple[str, float, float, list[Any]]]:
    """(case, largest difference of losses, of weights; replicated values)."""
    found = []
    for name in names:
        case = CASES[name]
        dtype = torch.float32 if case.get("amp") else torch.float64
        plain, ours = Net(dtype=dtype), Net(world.rank, dtype=dtype)  # others on each rank: the first one's hold
        expected, got = train(plain, world, dtype, False, **case), train(ours, world, dtype, True, **case)
        whole = full_state_dict(ours)
        off = max(float((v - whole[k]).abs().max()) for k, v in plain.state_dict().items())
        apart = max(abs(a - b) for a, b in zip(expected, got, strict=True))
        put = {id(m.weight) for m in placed_layers(ours).values()}
        found.append((name, apart, off, [p.detach().tolist() for p in ours.parameters() if id(p) not in put]))
    return found


@pytest.mark.parametrize("size", [2, *full(3)])
def test_it_trains_as_plain_ddp_does_and_what_is_replicated_has_the_same_bits(fleet: Fleet, size: int) -> None:
    ranks = fleet.run(size, beside_ddp, list(CASES))
    for name, apart, off, _ in (x for found in ranks for x in found):
        most = CASES[name].get("most", 0.05 if CASES[name].get("amp") else 1e-12)
        assert apart < most, name
        assert off < most, name
    for found in ranks[1:]:
        assert [x[3] for x in found] == [x[3] for x in ranks[0]]


def checkpoints(world: World) -> dict[str, Any]:
    """Into, and out of, an unplaced model; and a run that goes on."""
    plain, ours = Net(1, torch.float64), Net(2, torch.float64)
    commlib.place(ours, ["first", "last"])
    load_full_state_dict(ours, plain.state_dict())
    back = Net(3, torch.float64)
    back.load_state_dict(full_state_dict(ours))
    same = all(torch.equal(v, back.state_dict()[k]) for k, v in plain.state_dict().items())

    ddp, ends = DistributedDataParallel(ours), []
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(6):
        if step == 3:
            states = full_state_dict(ddp), full_optimizer_state_dict(ddp, optimizer)
        x, y = batch(step, world, torch.float64, uneven=False)
        (ddp(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ends.append(full_state_dict(ddp))
    other = Net(4, torch.float64)
    commlib.place(other, ["middle"])  # others stay put now
    ddp = DistributedDataParallel(other)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    load_full_state_dict(ddp, states[0])
    load_full_optimizer_state_dict(ddp, optimizer, states[1])
    for step in range(3, 6):
        x, y = batch(step, world, torch.float64, uneven=False)
        (ddp(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ends.append(full_state_dict(ddp))
    off = max(float((v - ends[1][k]).abs().max()) for k, v in ends[0].items())
    own = {k: v.clone() for k, v in ours.state_dict().items()}
    ours.load_state_dict(own)
    shapes = {k: tuple(v["exp_avg"].shape) for k, v in states[1]["state"].items()}
    said = ""
    if world.rank == 1:
        strange = {k.replace("[4:8]", "[0:4]").replace("[7:13]", "[0:7]"): v for k, v in own.items()}
        with pytest.raises(RuntimeError) as e:
            ours.load_state_dict(strange)
        said = str(e.value)
    return {"same": same, "off": off, "keys": list(own), "shapes": shapes, "said": said}


def test_whole_states_go_in_and_out_and_a_run_goes_on_with_other_layers_placed(fleet: Fleet) -> None:
    first, second = fleet.run(2, checkpoints)
    for found in (first, second):
        assert found["same"]
        assert found["off"] < 1e-12
        assert (13, 11) in found["shapes"].values()
    assert "first.weight[0:7]" in first["keys"]
    assert "first.weight[7:13]" in second["keys"]
    assert "first.weight[0:7]" in second["said"]  # another rank's part is no part of this one


def whole_numbers(world: World) -> list[Any]:
    """Whether gradients are finite that come of one rank's inf, and those of the next step."""
    seen = []
    for name in ("first", "middle"):
        model = Net(0)
        commlib.place(model, name)
        ddp = DistributedDataParallel(model)
        x, _ = batch(0, world, torch.float32, uneven=False)
        layer: Any = placed_layers(model)[name]
        y = ddp(x)
        (y * torch.tensor(float("inf") if world.rank == 1 else 1.0)).sum().backward()
        seen.append([p.grad is not None and bool(p.grad.isfinite().all()) for p in (layer.weight, model.last.weight)])
        model.zero_grad()
        ddp(x).sum().backward()
        seen.append([p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()])
    return seen


def test_a_rank_that_is_not_finite_is_seen_by_all_and_leaves_no_trace(fleet: Fleet) -> None:
    for found in fleet.run(2, whole_numbers):
        for bad, good in (found[:2], found[2:]):
            assert not all(bad)
            assert all(good)


def misused(world: World) -> list[str]:
    model, tied = Net(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    frozen = Net()
    frozen.first.weight.requires_grad_(False)
    placed = Net()
    commlib.place(placed, "first")
    calls: list[Any] = [
        lambda: commlib.place(DistributedDataParallel(model), "*"),
        lambda: commlib.place(model, "frist"),
        lambda: commlib.place(model, "norm"),
        lambda: commlib.place(tied, "0"),
        lambda: commlib.place(frozen, "*"),
        lambda: commlib.place(model, "auto"),
        lambda: commlib.place(nn.Linear(3, 3), "*"),
        lambda: commlib.place(placed, "last"),
        lambda: commlib.place(model, "first", timeout=0),
        lambda: placed.first(torch.zeros(2, 11, dtype=torch.float64)),
        lambda: placed.first(torch.zeros(2, 12)),
        lambda: pickle.dumps(placed),
    ]
    said = []
    for call in calls:
        with pytest.raises((TypeError, ValueError)) as e:
            call()
        said.append(str(e.value))
    assert isinstance(copy.deepcopy(placed).first, PlacedLinear)
    x = torch.ones(2, 11, requires_grad=True)
    (dx,) = torch.autograd.grad(placed.first(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
    return said


def test_what_cannot_be_placed_is_told_by_what_is_wrong_with_it(fleet: Fleet) -> None:
    said = fleet.run(2, misused)[0]
    parts = [
        "wrapped in DDP", "did you mean 'first'", "unknown linear layer 'norm'", "'0' cannot be placed",
        "frozen", "give example=", "nn.Sequential", "already", "timeout", "float64", "(…, 11)", "full_state_dict",
    ]  # fmt: skip
    for part, text in zip(parts, said, strict=True):
        assert part in text


def unlike(world: World) -> list[str]:
    said = []
    for call in (
        lambda: commlib.place(Net(), ["first", "last"][world.rank]),
        lambda: commlib.place(Net(), ["first", "frist"][world.rank]),
        lambda: commlib.place(Net(), "first", codec=["int8", "fp16"][world.rank]),
        lambda: commlib.place(Net(), "first", codec=["int8", "dgc"][world.rank]),
    ):
        with pytest.raises((PlanMismatch, ValueError)) as e:
            call()
        said.append(str(e.value))
    model = Net()
    commlib.place(model, "*")
    with pytest.raises(PlanMismatch) as e:
        (model.first if world.rank == 0 else model.middle)(torch.ones(1, 11 if world.rank == 0 else 13))
    said.append(str(e.value))
    return said


def test_ranks_that_do_something_else_are_told_so(fleet: Fleet) -> None:
    (other, failed, codec, memory, call), (_, typo, *_) = fleet.run(2, unlike)
    assert "int8" in codec
    assert "fp16" in codec
    assert "remembers" in memory
    assert "first" in other
    assert "rank 1 failed" in failed
    assert "frist" in typo
    assert "rank 0 called layer 'first'" in call
    assert "rank 1 called layer 1" in call


def alone(world: World) -> None:
    model = Net()
    commlib.place(model, "first")
    if world.rank == 0:
        model(torch.ones(2, 11))
    else:
        os._exit(0)


@pytest.mark.full
def test_nobody_waits_for_ever_for_a_rank_that_is_gone_and_it_has_a_name(fleet: Fleet) -> None:
    with pytest.raises(RankFailed, match=r"PeerLost: rank 0 of 2 could not meet at layer 'first'.*rank 1 did not"):
        fleet.run(2, alone)


def by_itself(world: World) -> list[Any]:
    """``auto`` on Gloo between processes: both ranks decide alike, the model is as it was, and it trains."""
    model = Net(5)
    drawn = torch.get_rng_state()
    placement = commlib.place(model, "auto", example=batch(0, world, torch.float32, uneven=False)[0])
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    ddp = DistributedDataParallel(model)
    commlib.attach(ddp).close()
    ddp(batch(1, world, torch.float32, uneven=False)[0]).sum().backward()
    assert placement.considered is not None
    return [
        list(placement.layers),
        str(placement),
    ]


def test_auto_decides_alike_on_all_ranks_and_shows_what_it_weighed_up(fleet: Fleet) -> None:
    (names, text), (others, told) = fleet.run(2, by_itself)
    assert names == others
    assert text == told
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["layer", "first", "middle", "last"]
