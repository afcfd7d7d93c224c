"""Copies of an attached model: they are plain, and what they were made of goes on."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import commlib
from commlib.ddp.compat import CopiedState
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import batch, model, same_everywhere

RULES = ("none", "onebit", "factors", "auto")
HOWS = ("deepcopy", "pickle", "torch.save")


def backward(ddp: nn.Module, world: World, step: int) -> Tensor:
    x, y = batch(world, step)
    ddp.zero_grad()
    nn.functional.cross_entropy(ddp(x), y).backward()
    return torch.cat([p.grad.reshape(-1).clone() for p in ddp.parameters() if p.grad is not None])


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


def copied(what: Any, how: str) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(what)
    if how == "pickle":
        return pickle.loads(pickle.dumps(what))
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def twins(world: World, rule: str, how: str) -> dict[str, Any]:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    comm = commlib.attach(ddp, rule, min_size=0)
    backward(ddp, world, 0)
    twin = copied(ddp, how)
    plain = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    backward(plain, world, 0)
    found: dict[str, Any] = {
        "module": torch.equal(weights(copied(ddp.module, how)), weights(ddp)),
        "plain": torch.equal(backward(twin, world, 1), backward(plain, world, 1)),
        "told nobody": comm.stats().steps == 1,
    }
    again = commlib.attach(twin, "onebit", min_size=0)
    found["attached to"] = same_everywhere(world, backward(twin, world, 2)) and again.stats().steps == 1
    again.close()
    found["goes on"] = same_everywhere(world, backward(ddp, world, 1)) and comm.stats().steps == 2
    comm.close()
    return found


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("rule", RULES)
def test_a_copy_of_the_model_is_plain_ddp_and_can_be_attached_to(fleet: Fleet, rule: str, how: str) -> None:
    for found in fleet.run(2, twins, rule, how):
        assert all(found.values()), found


def state_alone(world: World) -> list[str]:
    comm = commlib.attach(DistributedDataParallel(model()), "onebit")
    said = []
    for how in HOWS:
        twin = copied(comm, how)
        assert type(twin) is CopiedState
        with pytest.raises(AttributeError) as caught:
            twin.stats()
        said.append(str(caught.value))
    comm.close()
    return said


def test_a_copy_of_the_state_alone_says_that_it_is_nobodys(fleet: Fleet) -> None:
    for said in fleet.run(2, state_alone):
        assert all("has no stats" in s and "attach" in s for s in said)


def averaged(world: World, rule: str | None, of: str, form: str) -> tuple[bool, bool, Tensor]:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    comm: Any = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    source = ddp if of == "ddp" else ddp.module
    options: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if form == "EMA" else {}
    average = AveragedModel(source, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(3):
        backward(ddp, world, step)
        optimizer.step()
        average.update_parameters(source)
    found = weights(average)
    if comm is not None:
        comm.close()
    return same_everywhere(world, found), not torch.equal(found, weights(ddp)), found


@pytest.mark.parametrize("form", ["EMA", *full("SWA")])
@pytest.mark.parametrize("of", ["ddp", *full("module")])
def test_averages_of_weights_are_equal_on_all_ranks(fleet: Fleet, of: str, form: str) -> None:
    (_, _, plain), _ = fleet.run(2, averaged, None, of, form)
    for rule in RULES:
        for same, moved, found in fleet.run(2, averaged, rule, of, form):
            assert same
            assert moved
            assert rule != "none" or torch.equal(found, plain)
