"""A step with an inf or NaN on one rank: every rank sees it, and afterwards it never happened."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import PAIRS, Trainer, poison, same_everywhere

BAD_STEP = 4


def states_equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if a.keys() != b.keys() or a["step"] != b["step"]:
        return False
    for rank in a["ranks"]:
        for name, slots in a["ranks"][rank].items():
            for key, entry in slots.items():
                if not torch.equal(entry["value"], b["ranks"][rank][name][key]["value"]):
                    return False
    return True


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)


def with_and_without(world: World, rule: Any, amp: bool, layer: str, value: float, **options: Any) -> list[str]:
    """What is wrong, in words."""
    undo: list[Any] = []

    def disturb(step: int) -> None:
        while undo:
            undo.pop()()
        if step == BAD_STEP and world.rank == world.size - 1:
            undo.append(poison(bad.module, layer, value))

    bad = Trainer(world, rule, scaler=scaler() if amp else None, **options)
    finite = bad.train(2 * BAD_STEP + 1, disturb)
    good = Trainer(world, rule, scaler=scaler() if amp else None, **options)
    good.train(BAD_STEP)
    good.step += 1
    if good.scaler:
        good.scaler.update(128.0)  # what the skipped step did to the other one's scale
    good.train(BAD_STEP)
    wrong = []
    if finite != [i != BAD_STEP for i in range(2 * BAD_STEP + 1)]:
        wrong.append(f"finite steps on rank {world.rank}: {finite}")
    if not torch.equal(bad.weights(), good.weights()):
        wrong.append("the weights differ from those of the run without the step")
    watched = any(p.route.codec.slots(p.spec) or p.route.codec.random for p in bad.comm.plan)
    if watched and not states_equal(bad.comm.state_dict(), good.comm.state_dict()):
        wrong.append("the residuals differ from those of the run without the step")
    if not same_everywhere(world, bad.weights()):
        wrong.append("replicas differ")
    stats = bad.comm.stats()
    if watched and (stats.skipped, stats.steps) != (1, 2 * BAD_STEP):
        wrong.append(f"{stats.skipped} steps skipped, {stats.steps} kept")
    bad.close()
    good.close()
    return wrong


def all_pairs(world: World, pairs: list[str], amp: bool, value: float) -> dict[str, list[str]]:
    return {pair: with_and_without(world, pair, amp, "2.weight", value) for pair in pairs}


SOME = (
    *("none@dense", "onebit@scatter_gather", "qsgd@gather", "dgc:ratio=0.05@gather", "powersgd:rank=2@low_rank"),
    *("blocks:keep=0.2,staleness=6,block=32@blocks", "none@factors", "none@owners"),
)


@pytest.mark.parametrize("pairs", [SOME, *full((PAIRS,))])
@pytest.mark.parametrize(("amp", "value"), [(True, float("inf")), (False, float("nan"))])
def test_a_non_finite_step_leaves_no_trace_with_any_codec_over_any_exchange(
    fleet: Fleet, amp: bool, value: float, pairs: tuple[str, ...]
):
    for report in fleet.run(2, all_pairs, list(pairs), amp, value):
        assert {pair: wrong for pair, wrong in report.items() if wrong} == {}


def dense_bucket(world: World) -> list[str]:
    """The inf comes through a bias that is exchanged uncompressed; the compressed layers must forget the step too."""
    rule = {"*.weight": "onebit@scatter_gather", "*": "dense"}
    return with_and_without(world, rule, True, "4.bias", float("inf"))


def test_an_inf_in_a_dense_bucket_rolls_back_the_residuals_of_all_others(fleet: Fleet):
    assert fleet.run(3, dense_bucket) == [[], [], []]


def moving_scale(world: World, rules: list[str]) -> dict[str, bool]:
    """Powers of two scale exactly, so a scaler whose scale moves must change nothing at all."""
    same = {}
    for rule in rules:
        plain = Trainer(world, rule)
        plain.train(12)
        scaled = Trainer(world, rule, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2))
        scaled.train(6)
        assert scaled.scaler is not None
        scaled.scaler.update(64.0)
        scaled.train(6)
        same[rule] = torch.equal(plain.weights(), scaled.weights()) and scaled.scaler.get_scale() != 1024.0
        state, other = plain.comm.state_dict(), scaled.comm.state_dict()
        same[rule] &= states_equal(state, other)
        plain.close()
        scaled.close()
    return same


def test_residuals_keep_their_meaning_when_the_loss_scale_moves(fleet: Fleet):
    rules = ["onebit@scatter_gather", "onebit@gather", "int8", "topk:ratio=0.1", "dgc:ratio=0.05", "sign"]
    for report in fleet.run(2, moving_scale, rules):
        assert report == dict.fromkeys(rules, True)


def discarding(world: World) -> bool:
    """A user who drops a step for reasons of their own says so, and residuals stay as they were."""
    a, b = Trainer(world, "onebit"), Trainer(world, "onebit")
    a.train(3)
    b.train(3)
    before = [p.detach().clone() for p in a.module.parameters()]
    momentum = copy.deepcopy(a.optimizer.state_dict())
    a.train(1)
    a.comm.discard_step()
    with torch.no_grad():
        for p, old in zip(a.module.parameters(), before, strict=True):
            p.copy_(old)
    a.optimizer.load_state_dict(momentum)
    b.step += 1
    a.train(3)
    b.train(3)
    equal = torch.equal(a.weights(), b.weights())
    a.close()
    b.close()
    return equal


def test_a_step_that_the_user_discards_leaves_no_trace(fleet: Fleet):
    assert fleet.run(2, discarding) == [True, True]
