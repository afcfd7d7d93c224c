"""Whether a layer's gradient is made of its rows alone: not where another DDP model has the layer, too."""

from __future__ import annotations

import gc
from unittest import mock

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.exchange.factors import guard
from commlib.groups.world import World
from tests.support.rank_pool import Fleet


def found(world: World) -> list[str]:
    """What is wrong with the shared parameters found as models come and go, some before anybody looks."""
    common, own = nn.Linear(3, 3), nn.Linear(3, 3)
    mine, shared = [*common.parameters(), *own.parameters()], {id(p) for p in common.parameters()}
    wrong = []

    def expect(what: str, ddp: DistributedDataParallel, ids: set[int]) -> None:
        if guard.sharing(ddp, mine) != ids:
            wrong.append(what)

    one = DistributedDataParallel(nn.Sequential(common, own))
    before = DistributedDataParallel(nn.Sequential(common))
    guard._models.clear()  # as if its module were imported now
    guard._look_around.cache_clear()
    expect("made before", one, shared)
    expect("the other one's", before, {id(p) for p in mine})
    made = guard.ddp_models_made()
    later = DistributedDataParallel(nn.Sequential(own))
    if guard.ddp_models_made() == made:
        wrong.append("not counted")
    with mock.patch.object(gc, "get_objects", side_effect=AssertionError("looked through all objects again")):
        expect("made later", one, shared | {id(p) for p in own.parameters()})
        del later, before
        expect("gone", one, set())
    one.__dict__["cycle"] = one  # only the collector frees it
    del one
    expect("gone in a cycle", DistributedDataParallel(nn.Sequential(common)), set())
    return wrong


def test_parameters_of_another_ddp_model_are_found_whenever_it_was_made_and_until_it_is_gone(fleet: Fleet) -> None:
    assert fleet.run(1, found) == [[]]
