"""Codecs of a sharded model that are chosen while it trains: what is exchanged is right whatever is chosen, and when.

Which codec is the fastest is for tests/commlib/fsdp/test_trials.py; here the decisions are given, but for one test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import commlib
from commlib.fsdp import chooser
from commlib.fsdp.trials import Turn, UnitTimes
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import same_everywhere
from tests.support.tiny_fsdp import ShardedTrainer, batch

HALF = "bf16:ef=off"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
UNITS = "the root", "second"


class Told:
    """Decisions in the place of trials: (codec of gradients, codec of parameters), two steps each; the last stays."""

    def __init__(self, script: Sequence[tuple[str, str]], units: dict[str, list[str]]) -> None:
        self._turns = [
            Turn(dict.fromkeys(units.get(codec, []), codec), values, 2, 0, "trial") for codec, values in script
        ]
        self._turns[-1] = dataclasses.replace(self._turns[-1], phase="steady", step_s=(0.1, 0.2))
        self.seen: list[UnitTimes] = []

    def first(self) -> Turn:
        return self._turns[0]

    def review(self, f: UnitTimes) -> Turn:
        self.seen.append(f)
        self._turns = self._turns[1:] or self._turns
        return self._turns[0]


@contextlib.contextmanager
def told(*script: tuple[str, str]) -> Iterator[list[Told]]:
    """A context in which decisions are given, if there is a script; has what was made of them."""
    made: list[Told] = []
    if not script:
        yield made
        return

    def trials(units: dict[str, list[str]], values: list[str]) -> Told:
        made.append(Told(script, units))
        return made[-1]

    with mock.patch.object(chooser, "CodecTrials", trials):
        yield made


def trained(
    world: World, rule: Any, steps: int, script: Sequence[tuple[str, str]] = (), options: dict[str, Any] | None = None
) -> Any:
    with told(*script) as made:
        trainer = ShardedTrainer(world, rule, **options or {})
        trainer.train(steps)
    found = {"weights": trainer.weights(), "equal": same_everywhere(world, trainer.weights())}
    if rule is not None:
        found |= {"plan": str(trainer.comm.plan), "stats": trainer.comm.stats(), "seen": [t.seen for t in made]}
        found["coded"] = {layer.route for layer in trainer.comm.parameter_stats().layers.values()}
        found["held"] = sorted(trainer.comm.state_dict()["ranks"][str(world.rank)])
    trainer.close()
    return found


def test_a_codec_that_is_chosen_carries_what_it_would_have_as_a_rule(fleet: Fleet) -> None:
    policy, script = commlib.Lossy(["int8:ef=off"]), [("", ""), ("int8:ef=off", "")]
    given = fleet.run(2, trained, "int8:ef=off", 7, (), {"dense_steps": 2})
    for one, other in zip(given, fleet.run(2, trained, policy, 7, script), strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert "int8:ef=off@reduce_scatter" in other["plan"]
        assert "measured" in other["plan"]
        assert "100 ms a step, 200 ms without" in other["plan"]


def test_figures_of_each_unit_and_of_steps_come_to_the_first_rank(fleet: Fleet) -> None:
    found = fleet.run(2, trained, commlib.Lossy(["int8"]), 5, [("", ""), ("int8", "")])
    (first, *_), _ = found[0]["seen"][0], found[1]["seen"]
    assert first.steps == 2
    assert set(first.units) == set(UNITS)
    assert 0 < sum(first.units.values()) < first.span
    assert found[1]["seen"] == [[]]


@pytest.mark.parametrize("codec", ["onebit", *full("topk:ratio=0.1", "int8")])
def test_what_a_codec_has_held_back_goes_out_once_it_is_not_chosen(fleet: Fleet, codec: str) -> None:
    script = [("", ""), (codec, ""), ("", "")]
    plain = fleet.run(2, trained, None, 8)[0]["weights"]
    for found in fleet.run(2, trained, commlib.Lossy([codec]), 8, script):
        assert found["equal"]
        assert found["held"] == []
        assert float((found["weights"] - plain).abs().max()) < 0.1


@full
@pytest.mark.parametrize("seed", range(3))
def test_codecs_that_change_every_two_steps_leave_all_ranks_alike(fleet: Fleet, seed: int) -> None:
    draw = random.Random(seed)
    codecs, values = ("", "onebit", "int8", "topk:ratio=0.1"), ("", "bf16", "int8")
    script = [("", ""), *((draw.choice(codecs), draw.choice(values)) for _ in range(12)), ("", "")]
    policies = commlib.Lossy(codecs[1:]), commlib.Lossy(values[1:])
    for found in fleet.run(3, trained, policies[0], 30, script, {"parameters": policies[1]}):
        assert found["equal"]
        assert found["held"] == []
        assert found["weights"].isfinite().all()


def test_parameters_come_by_the_codec_that_is_chosen_for_them(fleet: Fleet) -> None:
    script, options = [("", ""), ("", "bf16")], {"parameters": commlib.Lossy("bf16")}
    always = fleet.run(2, trained, "none", 6, (), {"parameters": "bf16"})
    for one, other in zip(always, fleet.run(2, trained, "auto", 6, script, options), strict=True):
        assert float((one["weights"] - other["weights"]).abs().max()) < 1e-2  # its first two steps came as they are
        assert other["coded"] == {"bf16:ef=off"}
        assert "for parameters as they are or bf16" in other["plan"]
        assert "parameters by bf16" in other["plan"]


def test_gradients_whose_codec_is_named_go_by_it_whatever_is_chosen_for_parameters(fleet: Fleet) -> None:
    script, options = [("", ""), ("", "bf16")], {"parameters": commlib.Lossy("bf16")}
    for found in fleet.run(2, trained, "int8:ef=off", 6, script, options):
        assert found["coded"] == {"bf16:ef=off"}
        assert "int8:ef=off@reduce_scatter" in found["plan"]
        assert "measured" not in found["plan"]  # that codec was not
        assert found["equal"]


def in_halves(world: World, rule: Any, script: Sequence[tuple[str, str]], passes: int) -> Any:
    """Steps in bf16 that are summed in float32, over ranks and over so many backward passes."""
    with told(*script):
        trainer = ShardedTrainer(world, rule, policy=BF16)
    for step in range(6):
        trainer.optimizer.zero_grad()
        for n in reversed(range(passes)):
            x, y = batch(world.rank, passes * step + n)
            trainer.model.set_requires_gradient_sync(n == 0)
            torch.nn.functional.cross_entropy(trainer.model(x).float(), y).backward()
        trainer.optimizer.step()
    found = trainer.weights(), str(trainer.comm.plan) if rule else "", trainer.comm.stats().ratio if rule else 1.0
    trainer.close()
    return found


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_computed_in_bf16_travel_so_and_nothing_is_lost(fleet: Fleet, passes: int) -> None:
    plain = fleet.run(2, in_halves, None, [], passes)
    for one, other in zip(plain, fleet.run(2, in_halves, "auto", [("", ""), (HALF, "")], passes), strict=True):
        assert torch.equal(one[0], other[0])
        assert ("nothing is lost" in other[1]) == (passes == 1)  # what several have summed in float32 goes as it is
        assert (other[2] > 1.2) == (passes == 1)


def uneven(world: World, rule: Any, script: Sequence[tuple[str, str]]) -> Any:
    """Steps in bf16; in the first four rank 0 sums two backward passes, and the others have one. Nothing is sharded
    again between two, so no collective tells them.
    """
    with told(*script):
        trainer = ShardedTrainer(world, rule, policy=BF16, shard={"reshard_after_forward": False})
    plans = []
    for step in range(10):
        trainer.optimizer.zero_grad()
        for n in reversed(range(2 if step < 4 and world.rank == 0 else 1)):
            x, y = batch(world.rank, 2 * step + n)
            trainer.model.set_requires_gradient_sync(n == 0)
            trainer.model.set_reshard_after_backward(n == 0)
            torch.nn.functional.cross_entropy(trainer.model(x).float(), y).backward()
        trainer.optimizer.step()
        plans.append(rule is not None and "nothing is lost" in str(trainer.comm.plan))
    found = trainer.weights(), plans
    trainer.close()
    return found


def test_while_a_rank_sums_more_passes_than_others_gradients_go_as_they_are(fleet: Fleet) -> None:
    plain = fleet.run(2, uneven, None, [])
    for one, other in zip(plain, fleet.run(2, uneven, "auto", [("", ""), (HALF, "")]), strict=True):
        assert torch.equal(one[0], other[0])
        assert other[1] == [False] * 5 + [True] * 5  # decided after every second step, and by the two before


def unlike(world: World) -> list[str]:
    trainer = ShardedTrainer(world, "auto")
    before = str(trainer.comm.plan)
    trainer.train(2)
    trainer.close()
    return [before]


def test_without_anything_to_choose_nothing_is_attached_and_the_plan_says_why(fleet: Fleet) -> None:
    for (plan,) in fleet.run(2, unlike):
        assert "nothing else is exact for these gradients" in plan


def test_under_hsdp_all_replicas_change_at_the_same_step(fleet: Fleet) -> None:
    policy, script = commlib.Lossy(["int8:ef=off"]), [("", ""), ("int8:ef=off", "")]
    by_measurement = fleet.run(4, trained, policy, 6, script, {"replicas": 2})
    given = fleet.run(4, trained, "int8:ef=off", 6, (), {"dense_steps": 2, "replicas": 2})
    for one, other in zip(given, by_measurement, strict=True):
        assert torch.equal(one["weights"], other["weights"])
        assert other["equal"]


def cannot_measure(world: World) -> tuple[str, bool]:
    fails = mock.patch.object(chooser.CodecChooser, "_figures", side_effect=ZeroDivisionError)
    with contextlib.ExitStack() as patched:
        if world.rank == 1:
            patched.enter_context(fails)
        trainer = ShardedTrainer(world, commlib.Lossy(["int8"]))
        trainer.train(8)
    found = str(trainer.comm.plan), same_everywhere(world, trainer.weights())
    trainer.close()
    return found


def test_where_a_rank_cannot_measure_all_goes_as_it_is(fleet: Fleet) -> None:
    for plan, equal in fleet.run(2, cannot_measure):
        assert equal
        assert "measuring has failed" in plan
        assert "int8@" not in plan


def by_itself(world: World) -> tuple[str, bool]:
    trainer = ShardedTrainer(world, commlib.Lossy(["int8", "onebit"]))
    trainer.train(200)
    found = str(trainer.comm.plan), same_everywhere(world, trainer.weights())
    trainer.close()
    return found


@full
def test_it_comes_to_a_choice_by_itself(fleet: Fleet) -> None:
    for plan, equal in fleet.run(2, by_itself):
        assert equal
        assert "ms a step, plain FSDP2" in plan


def refused(world: World, rule: Any, parameters: Any) -> str:
    trainer = ShardedTrainer(world, None)
    try:
        commlib.attach(trainer.model, rule, parameters=parameters)
    except (TypeError, ValueError) as e:
        return str(e)
    return "nothing"


@pytest.mark.parametrize(
    ("rule", "parameters", "said"),
    [
        ("lossy:powersgd", None, "is not for sharded models"),
        ("lossy:none", None, "loses nothing"),
        ("lossy:dgc", None, "from the first step on"),
        ("none", "lossy:qsgd", "must see the same"),
        ("none", "lossy:", "names no codec"),
        ({"*": "auto"}, None, "whole model"),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_name(fleet: Fleet, rule: Any, parameters: Any, said: str) -> None:
    for text in fleet.run(2, refused, rule, parameters):
        assert said in text
