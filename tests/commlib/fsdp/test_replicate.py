"""``replicate``, DDP's successor on FSDP2's mechanism, is exchanged as DDP is: routes between all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import same_everywhere
from tests.support.tiny_fsdp import ShardedTrainer

replicate: Any = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
STEPS = 5


def trained(world: World, rule: str | None, **options: Any) -> dict[str, Any]:
    trainer = ShardedTrainer(world, rule, wrap=replicate, **options)
    trainer.train(STEPS)
    found = {"weights": trainer.weights(), "equal": same_everywhere(world, trainer.weights())}
    if rule is not None:
        stats = trainer.comm.stats()
        found |= {"plan": str(trainer.comm.plan), "ratio": stats.ratio, "steps": stats.steps}
    trainer.close()
    return found


def test_without_a_codec_weights_are_replicate_s_own_to_the_last_bit(fleet: Fleet) -> None:
    plain = fleet.run(2, trained, None)
    for rule in ("none", "auto"):
        for one, other in zip(plain, fleet.run(2, trained, rule), strict=True):
            assert torch.equal(one["weights"], other["weights"])
            assert ("replicate: routes between 2 ranks" in other["plan"]) == (rule == "none")  # "auto" says why


@pytest.mark.parametrize("rule", ["int8", *full("onebit", "powersgd:rank=2", "topk:ratio=0.1", "fp16")])
def test_by_a_codec_replicas_are_equal_and_fewer_bytes_are_sent(fleet: Fleet, rule: str) -> None:
    plain = fleet.run(2, trained, None)[0]["weights"]
    for found in fleet.run(2, trained, rule):
        assert found["equal"]
        assert found["steps"] == STEPS
        assert found["ratio"] > 1.5
        assert float((found["weights"] - plain).abs().max()) < 0.1


def a_state_is_moved(world: World, rule: str) -> tuple[bool, bool, bool]:
    straight = ShardedTrainer(world, rule, wrap=replicate)
    straight.train(STEPS)
    halfway = ShardedTrainer(world, rule, wrap=replicate)
    halfway.train(2)
    state = halfway.comm.state_dict()
    halfway.comm.detach()
    halfway.comm = commlib.attach(halfway.model, rule, min_size=0)
    halfway.comm.load_state_dict(state)
    halfway.train(STEPS - 2)
    before = halfway.weights()
    halfway.train(2, spoil={STEPS: float("inf"), STEPS + 1: 1.0})
    stats = halfway.comm.stats()
    found = torch.equal(before, straight.weights()), stats.skipped == 1, bool(halfway.weights().isfinite().all())
    straight.close()
    halfway.close()
    return found


@pytest.mark.parametrize("rule", ["onebit", *full("powersgd:rank=2")])
def test_a_loaded_state_goes_on_and_a_step_that_is_not_finite_leaves_no_trace(fleet: Fleet, rule: str) -> None:
    assert fleet.run(2, a_state_is_moved, rule) == [(True, True, True)] * 2


def refused(world: World) -> str:
    trainer = ShardedTrainer(world, None, wrap=replicate)
    try:
        commlib.attach(trainer.model, "int8", parameters="bf16")
    except ValueError as e:
        return str(e)
    return "nothing"


def test_a_codec_for_parameters_is_refused_for_they_do_not_travel(fleet: Fleet) -> None:
    assert all("none are gathered" in said for said in fleet.run(2, refused))


def alone(world: World) -> list[bool]:
    trainer = ShardedTrainer(world, "int8", parameters="bf16")
    trainer.train(STEPS)
    found = [bool(trainer.weights().isfinite().all())]
    trainer.close()
    return found


def test_one_rank_of_fsdp2_may_have_one_though_it_has_all_parameters_too(fleet: Fleet) -> None:
    assert fleet.run(1, alone) == [[True]]
