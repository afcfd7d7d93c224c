"""An attached model is saved and loaded as plain DDP, where commlib is not installed, at any moment."""

from __future__ import annotations

import copy
import pickle
import pickletools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import batch, model


def names(data: bytes) -> set[str]:
    """Top-level modules that a pickle imports from."""
    strings, found = list[str](), set[str]()
    for code, argument, _ in pickletools.genops(data):
        if code.name == "GLOBAL":
            found.add(str(argument).split(".")[0])
        elif code.name == "STACK_GLOBAL":
            found |= {text.split(" ")[0].split(".")[0] for text in strings[-8:]}  # its module is among the last
        if isinstance(argument, str):
            strings.append(argument)
    return found


def pickled(world: World, rule: str | None, style: str) -> list[str]:
    """What was wrong with copies and pickles between two steps, in the middle of one, and after :meth:`detach`."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    comm: Any = None
    if rule is not None and style == "attach":
        comm = commlib.attach(ddp, rule, min_size=0)
    elif rule is not None:
        comm = commlib.HookState(ddp, rule, min_size=0)
        ddp.register_comm_hook(comm, commlib.hook)
    wrong = []

    def look(moment: str) -> None:
        twin = copy.deepcopy(ddp)
        made = {"model": ddp, "copy": twin, "copy of a copy": copy.deepcopy(twin), "average": AveragedModel(ddp)}
        for what, one in {**made, "inner": ddp.module, "inner copy": copy.deepcopy(ddp.module)}.items():
            data = pickle.dumps(one)
            back = pickle.loads(data)
            kinds = {type(m) for m in back.modules()} - {DistributedDataParallel, AveragedModel}
            if b"commlib" in data or names(data) & {"commlib"}:
                wrong.append(f"{what} {moment}: needs commlib")
            if kinds != {nn.Sequential, nn.Linear, nn.Tanh}:
                wrong.append(f"{what} {moment}: has {kinds}")
            if isinstance(back, DistributedDataParallel) and back._comm_hooks:
                wrong.append(f"{what} {moment}: has a hook")

    for step in range(3):
        x, y = batch(world, step)
        ddp.zero_grad()
        look(f"before step {step}")
        loss = nn.functional.cross_entropy(ddp(x), y)
        ddp.zero_grad()
        if step == 2:
            look("between its forward and its backward pass")
        loss.backward()
    ddp.zero_grad()
    if comm is not None and style == "attach":
        comm.detach()
        look("after detach")
        comm.close()
    return wrong


@pytest.mark.parametrize(
    ("rule", "style"),
    [(None, ""), *((r, "attach") for r in ("none", "onebit", "factors", "auto")), ("onebit", "register")],
)
def test_pickles_and_copies_are_plain_ddp_and_need_no_commlib(fleet: Fleet, rule: str | None, style: str) -> None:
    assert fleet.run(2, pickled, rule, style) == [[], []]


def swapped(world: World, first: str) -> list[str]:
    import warnings

    ddp = DistributedDataParallel(nn.Linear(40, 40))
    comm = commlib.attach(ddp, first)
    ddp(torch.randn(2, 40)).sum().backward()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        comm.swap("onebit")
    comm.close()
    return [str(w.message) for w in seen]


@pytest.mark.parametrize("first", ["none", "auto"])
def test_swap_warns_of_no_hook_of_ours(fleet: Fleet, first: str) -> None:
    assert fleet.run(2, swapped, first) == [[], []]
