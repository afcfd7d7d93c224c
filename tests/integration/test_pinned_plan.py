"""A plan that is saved, loaded and given to ``attach``: the same routes, or an error that says what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet


def ddp_of(width: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 48)))


def pinned(world: World, folder: str) -> tuple[list[str], list[str], str, str]:
    path = Path(folder) / f"plan{world.rank}.json"
    first = commlib.attach(ddp_of(64), {"0.*": "factors", "2.weight": "onebit"})
    first.plan.save(path)
    first.close()
    plan = commlib.Plan.load(path)
    ddp = ddp_of(64)
    again = commlib.attach(ddp, plan)
    ddp(torch.randn(4, 64)).square().mean().backward()
    again.close()
    said = ""
    try:
        commlib.attach(ddp_of(32), plan)
    except ValueError as e:
        said = str(e)
    routes: Any = [[str(p.route) for p in comm.plan] for comm in (first, again)]
    return routes[0], routes[1], said, plan.diff(again.plan)


def test_a_saved_plan_is_pinned_and_refused_for_another_model(fleet: Fleet, tmp_path: Path) -> None:
    for before, after, said, difference in fleet.run(2, pinned, str(tmp_path)):
        assert before == after == ["none@factors", "none@factors", "onebit@gather", "none@dense"]
        assert "0.weight" in said
        assert "64x64" in said
        assert difference == "no difference"
