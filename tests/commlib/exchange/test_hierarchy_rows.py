"""Rows under a hierarchy on real ranks, as two nodes of two: by rule, chosen by measurement, and after other routes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange.registry import BY_ROWS
from commlib.groups.world import World
from commlib.planning.manager import manager
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.measurements import Measurements
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import Trainer, same_everywhere, through_delays, torchrun

ABOUT = "dense inside a node of 2, routes between 2 nodes"
MIXED = {"0.*": "factors", "2.*": "onebit@gather", "4.weight": "owners", "*": "none"}


def trainer(world: World, rule: Any, **options: Any) -> Trainer:
    if rule is None:
        return Trainer(world, rule)
    with torchrun(world, 2):
        return Trainer(world, rule, hierarchy=True, **options)


def apart(ours: Tensor, ddps: Tensor) -> float:
    return float((ours - ddps).abs().max() / ddps.abs().max())


def by_rule(world: World, rule: Any, options: dict[str, Any]) -> tuple[bool, float, str, list[str]]:
    ours, ddp = trainer(world, rule, **options), trainer(world, None)
    for t in (ours, ddp):
        t.train(20)
        t.close()
    plan = ours.comm.plan
    return (
        same_everywhere(world, ours.weights()),
        apart(ours.weights(), ddp.weights()),
        plan.about,
        [str(p.route) for p in plan],
    )


@pytest.mark.parametrize("rows", BY_ROWS)
@pytest.mark.parametrize("options", [{"dense_steps": 7}, *full({}, {"limit": "400mbit"})], ids=str)
def test_some_layers_go_by_rows_among_all_ranks_and_some_over_two_levels(
    fleet: Fleet, options: dict[str, Any], rows: str
) -> None:
    for same, off, about, routes in fleet.run(4, by_rule, {"0.*": rows, "*": "none"}, options):
        assert same
        assert off < 1e-4  # twenty steps, each in another order of summation
        assert about == ABOUT
        assert routes == [f"none@{rows}"] * 2 + ["none@dense"] * 4


def all_by_rows(world: World, rows: str) -> tuple[bool, float]:
    same, off, *_ = by_rule(world, rows, {})
    return same, off


@pytest.mark.full  # a rule for some of them is the same path
@pytest.mark.parametrize("rows", BY_ROWS)
def test_all_layers_may_go_by_rows(fleet: Fleet, rows: str) -> None:
    for same, off in fleet.run(4, all_by_rows, rows):
        assert same
        assert off < 1e-4


def delayed(world: World) -> tuple[bool, bool, int]:
    return through_delays(lambda: trainer(world, MIXED, cap=0.001), 20)


@pytest.mark.full
def test_random_delays_between_rounds_change_nothing(fleet: Fleet) -> None:
    for unchanged, equal, naps in fleet.run(4, delayed):
        assert unchanged
        assert equal
        assert naps > 8 * 20


def chosen(world: World, rule: Any) -> tuple[bool, float, bool, str, int]:
    ours, ddp = trainer(world, rule), trainer(world, None)
    steps = 0
    while not ours.comm.settled and steps < 1000:  # how soon depends on what is measured
        ours.train(5)
        steps += 5
    settled, plan = ours.comm.settled, ours.comm.plan  # later steps that take longer may unsettle it
    ours.train(12)  # into a review of steps that are watched
    ddp.train(steps + 12)
    state = ours.comm.state_dict()
    ours.comm.load_state_dict(state)
    ours.close()
    off = apart(ours.weights(), ddp.weights())
    return same_everywhere(world, ours.weights()), off, settled, str(plan), plan.local


@pytest.mark.full
def test_auto_measures_both_levels_and_settles(fleet: Fleet) -> None:
    for same, off, settled, plan, local in fleet.run(4, chosen, "auto"):
        assert same
        assert off < 2e-3  # hundreds of steps
        assert settled
        assert plan.startswith("exact routes, chosen by measurement (steady): predicted ")
        assert plan.splitlines()[0].endswith(f"; {ABOUT}")
        assert local == 2


@pytest.mark.full
def test_codecs_between_nodes_are_not_chosen_and_the_plan_says_so(fleet: Fleet) -> None:
    rule = "lossy:onebit+powersgd:rank=1+int8@factors"
    for same, _, settled, plan, _ in fleet.run(4, chosen, rule):
        assert same
        assert settled
        assert "under a hierarchy nobody measures yet what they cost" in plan.splitlines()[0]
        table = plan.partition("\n")[2]
        assert "onebit" not in table
        assert "powersgd" not in table


class Turns:
    """A head that lets all linear layers go by rows and back."""

    def __init__(self, model: Any) -> None:
        self.layers = [u.name for u in model.units.values() if u.shape is not None][::-1]
        self.on = False

    def first(self) -> Decision:
        return Decision(steps=2, probe=True)

    def review(self, f: Measurements) -> Decision:
        self.on = not self.on
        routes = dict.fromkeys(self.layers, "factors") if self.on else {}
        return Decision(routes, dict.fromkeys(routes, 8), steps=2, skip=0, probe=self.on, phase="trial")


def turned(world: World) -> tuple[bool, float, set[str]]:
    original = vars(manager)["Controller"]
    vars(manager)["Controller"] = Turns
    try:
        ours = trainer(world, "auto")
    finally:
        vars(manager)["Controller"] = original
    seen = set()
    for _ in range(13):
        ours.train(1)
        seen |= {p.route.exchange for p in ours.comm.plan}
    ddp = trainer(world, None)
    ddp.train(13)
    ours.close()
    return same_everywhere(world, ours.weights()), apart(ours.weights(), ddp.weights()), seen


@pytest.mark.full
def test_layers_come_to_rows_and_go_back_to_two_levels_while_the_link_is_probed(fleet: Fleet) -> None:
    for same, off, seen in fleet.run(4, turned):
        assert same
        assert off < 1e-4
        assert seen == {"factors", "dense"}


class Sum(nn.Module):
    """Layers side by side, so that gradients do not depend on the weights: what is sent can be added up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, n) for n in (40, 17))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = sum(f(x).sum() for f in self.layers)
        return out


def summed(world: World, rule: Any, steps: range, state: Any, model: Any) -> tuple[DistributedDataParallel, Any]:
    ddp = DistributedDataParallel(Sum())
    if model is not None:
        ddp.module.load_state_dict(model)
    comm = None
    if rule is not None:
        with torchrun(world, 2):
            comm = commlib.attach(ddp, rule, hierarchy=True, min_size=0)
        if state is not None:
            comm.load_state_dict(state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in steps:
        optimizer.zero_grad()
        ddp(torch.randn(6, 24, generator=torch.Generator().manual_seed(100 * step + world.rank))).backward()
        optimizer.step()
    if comm is not None:
        comm.close()
    return ddp, comm


def resumed(world: World) -> tuple[float, float]:
    """What codecs have held back between nodes goes out by rows, once."""
    first, comm = summed(world, "onebit@gather", range(5), None, None)
    second, _ = summed(world, "factors", range(5, 8), comm.state_dict(), first.module.state_dict())
    ddp, _ = summed(world, None, range(8), None, None)
    early, _ = summed(world, None, range(5), None, None)
    flat = [torch.cat([p.detach().view(-1) for p in m.parameters()]) for m in (first, early, second, ddp)]
    return apart(flat[0], flat[1]), apart(flat[2], flat[3])


def test_a_checkpoint_of_codecs_between_nodes_loses_nothing_when_layers_go_by_rows(fleet: Fleet) -> None:
    for before, after in fleet.run(4, resumed):
        assert before > 1e-3  # something was held back
        assert after < 2e-5
