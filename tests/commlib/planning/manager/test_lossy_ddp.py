"""``commlib.attach(ddp, Lossy(…))`` on real ranks: routes come and go, and no gradient is ever lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from commlib.planning.manager import manager
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.measurements import Measurements
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import same_everywhere

CODECS = ("onebit@gather", "onebit@scatter_gather", "int8:ef=on@scatter_gather", "topk:ratio=0.1", "powersgd:rank=1")
ROWS = "int8:ef=off@factors"


class Sum(nn.Module):
    """Layers side by side, so that gradients do not depend on the weights: what is sent can be added up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, n) for n in (40, 17, 33))
        self.scale = nn.Parameter(torch.zeros(30, 8))

    def forward(self, x: Tensor) -> Tensor:
        linear: Tensor = sum(f(x).sum() for f in self.layers)
        return linear + (x[:, :8].sum(0) * self.scale).sum()


class Whim:
    """A head that gives every unit any route, again and again; in the end all dense."""

    reviews = 6

    def __init__(self, model: Any) -> None:
        self._model, self._random, self._count = model, random.Random(5), 0
        self._payloads, self._by_rows = model._payloads, ["factors", "owners", *model._row_codecs]

    def first(self) -> Decision:
        return Decision(steps=2, probe=False)

    def review(self, f: Measurements) -> Decision:
        self._count += 1
        routes = {}
        for name, unit in self._model.units.items():
            ways = ["dense", *(r for r, units in self._payloads.items() if name in units)]
            ways += self._by_rows if unit.shape is not None else []
            routes[name] = self._random.choice(ways) if self._count < self.reviews else "dense"
        routes = {n: r for n, r in routes.items() if r != "dense"}
        rows = {n: 6 for n, r in routes.items() if r.endswith(("factors", "owners"))}
        return Decision(routes, rows, steps=3, skip=0, probe=False, phase="trial")


def attached(ddp: Any, head: Any, *more: str, **options: Any) -> Any:
    original, vars(manager)["Controller"] = vars(manager)["Controller"], head
    try:
        return commlib.attach(ddp, commlib.Lossy([*CODECS, *more]), min_size=0, **options)
    finally:
        vars(manager)["Controller"] = original


def batch(world: World, step: int) -> Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(100 * step + world.rank))


def train(world: World, ddp: Any, steps: range, spoil: int = -1) -> None:
    """SGD without momentum; a step with anything non-finite is skipped, as by a GradScaler."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in steps:
        optimizer.zero_grad()
        loss = ddp(batch(world, step))
        (loss * float("inf") if step == spoil and world.rank == 1 else loss).backward()
        finite = all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None)
        assert finite is (step != spoil)
        if finite:
            optimizer.step()


def weights(ddp: Any) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])


def restless(world: World, spoil: int) -> tuple[bool, float, list[str]]:
    ours = DistributedDataParallel(Sum(), bucket_cap_mb=0.003)
    comm = attached(ours, Whim)
    seen: set[str] = set()
    for step in range(22):
        train(world, ours, range(step, step + 1), spoil)
        seen |= {str(p.route) for p in comm.plan}
    ddp = DistributedDataParallel(Sum(), bucket_cap_mb=0.003)
    train(world, ddp, range(22), spoil)
    comm.close()
    same = same_everywhere(world, weights(ours))
    return same, float((weights(ours) - weights(ddp)).abs().max() / weights(ddp).abs().max()), sorted(seen)


@pytest.mark.parametrize("spoil", [9, *full(-1, 5, 17)])
@pytest.mark.parametrize("size", [3, *full(2)])
def test_whatever_routes_layers_had_in_the_end_all_gradient_has_arrived(fleet: Fleet, size: int, spoil: int) -> None:
    for same, off, seen in fleet.run(size, restless, spoil):
        assert same
        assert off < 2e-5
        assert len(seen) >= 6


def with_rows(world: World) -> tuple[bool, list[str]]:
    """Compressed rows lose for good what their codec loses; so here only the replicas are looked at."""
    ours = DistributedDataParallel(Sum(), bucket_cap_mb=0.003)
    comm = attached(ours, Whim, ROWS)
    seen: set[str] = set()
    for step in range(22):
        train(world, ours, range(step, step + 1))
        seen |= {str(p.route) for p in comm.plan}
    comm.close()
    return same_everywhere(world, weights(ours)), sorted(seen)


def test_layers_come_to_compressed_rows_and_leave_them(fleet: Fleet) -> None:
    for same, seen in fleet.run(3, with_rows):
        assert same
        assert ROWS in seen


def resumed(world: World) -> float:
    """Saved in the middle of compressed routes, loaded into a manager that begins anew with all dense."""
    ours = DistributedDataParallel(Sum(), bucket_cap_mb=0.003)
    comm = attached(ours, Whim)
    train(world, ours, range(9))
    assert any(not p.route.codec.lossless for p in comm.plan)
    state, model = comm.state_dict(), ours.module.state_dict()
    again = DistributedDataParallel(Sum(), bucket_cap_mb=0.003)
    again.module.load_state_dict(model)
    other = attached(again, Whim)
    other.load_state_dict(state)
    train(world, again, range(9, 31))
    ddp = DistributedDataParallel(Sum(), bucket_cap_mb=0.003)
    train(world, ddp, range(31))
    comm.close()
    other.close()
    return float((weights(again) - weights(ddp)).abs().max() / weights(ddp).abs().max())


def test_a_checkpoint_loses_nothing_though_routes_are_chosen_anew(fleet: Fleet) -> None:
    assert max(fleet.run(2, resumed)) < 2e-5


def settles(world: World, rules: Any) -> tuple[bool, bool, str]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Conv1d(4, 64, 9), nn.Flatten(), nn.Linear(512, 300)))
    comm = commlib.attach(ddp, rules)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(1000):  # how soon depends on what is measured
        optimizer.zero_grad()
        x = torch.randn(64, 4, 16, generator=torch.Generator().manual_seed(100 * step + world.rank))
        ddp(x).square().mean().backward()
        optimizer.step()
        if comm.settled:  # alike on all ranks; later steps that take longer, as beside other tests, may unsettle it
            break
    settled = comm.settled
    comm.close()
    return same_everywhere(world, weights(ddp)), settled, str(comm.plan)


@pytest.mark.full  # it settles by real measurements: beside other tests that may take longer than the steps there are
@pytest.mark.parametrize("rules", ["lossy:onebit+fp16+powersgd:rank=2", commlib.Lossy("fp16"), "lossy:bf16@factors"])
def test_it_measures_tries_and_settles(fleet: Fleet, rules: Any) -> None:
    for same, settled, plan in fleet.run(3, settles, rules):
        assert same
        assert settled
        assert plan.startswith("exact routes and ")


def without_linear_layers(world: World) -> tuple[bool, str]:
    ddp = DistributedDataParallel(nn.Sequential(nn.Conv1d(4, 64, 9), nn.Flatten()))
    comm = commlib.attach(ddp, commlib.Lossy(["fp16"]))
    for step in range(12):
        ddp(torch.randn(2, 4, 16) + step).sum().backward()
    comm.close()
    return comm._manager is not None, str(comm.plan)


def test_a_model_without_linear_layers_has_codecs_to_choose(fleet: Fleet) -> None:
    for managed, plan in fleet.run(2, without_linear_layers):
        assert managed
        assert "fp16" in plan


def differently(world: World) -> str:
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    try:
        commlib.attach(ddp, commlib.Lossy(["fp16"] if world.rank else ["onebit"]), timeout=120)
    except commlib.PlanMismatch as e:
        return str(e)
    return "no error"


def test_ranks_that_allow_different_codecs_find_out_when_they_attach(fleet: Fleet) -> None:
    for said in fleet.run(2, differently):
        assert "chosen among" in said
        assert "onebit" in said
        assert "fp16" in said
