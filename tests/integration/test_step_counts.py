"""Ranks that have taken different numbers of steps are told so before anything differs, whoever's count is wrong."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import commlib
from commlib.errors import CommlibError, PlanMismatch
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import Trainer, batch, model, same_everywhere
from tests.support.tiny_fsdp import ShardedTrainer

Step = Callable[[], object]


def ddp(world: World, rule: str, **options: Any) -> tuple[Any, Step]:
    trainer = Trainer(world, rule, **options)
    return trainer.comm, functools.partial(trainer.train, 1)


def fsdp(world: World, rule: str) -> tuple[Any, Step]:
    trainer = ShardedTrainer(world, rule)
    return trainer.comm, functools.partial(trainer.train, 1)


def said(step: Step) -> str:
    """What a step raises; "nothing" if it goes through."""
    try:
        step()
    except CommlibError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


class ZeroComm:
    """A ShardedStep's residuals by the names of the others' methods."""

    def __init__(self, sharded: commlib.ShardedStep) -> None:
        self.state_dict, self.load_state_dict, self.close = sharded.residuals, sharded.load_residuals, sharded.close


def zero(world: World, rule: str) -> tuple[Any, Step]:
    module, taken = model(), iter(range(1000))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    sharded = commlib.ShardedStep(module, optimizer, rule, min_size=0)

    def step() -> None:
        x, y = batch(world, next(taken))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        sharded.step()

    return ZeroComm(sharded), step


def local(world: World, rule: str) -> tuple[Any, Step]:
    module, taken = model(), iter(range(1000))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    steps = commlib.LocalSteps(module, "average", rule, tau=2, min_size=0)

    def step() -> None:
        for _ in range(2):
            x, y = batch(world, next(taken))
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            steps.step()

    return steps, step


MAKE = {"ddp": ddp, "fsdp": fsdp, "zero": zero, "local": local}


def loads(comm: Any, early: Any) -> None:
    comm.load_state_dict(early)


def discards(comm: Any, early: Any) -> None:
    comm.discard_step()


def discards_what_was_asked_for(comm: Any, early: Any) -> None:
    comm.state_dict()
    comm.discard_step()


CHANGES = {f.__name__: f for f in (loads, discards, discards_what_was_asked_for)}


def one_rank_alone(world: World, kind: str, rule: str, change: str, who: int, options: dict[str, Any]) -> Any:
    comm, step = MAKE[kind](world, rule, **options)
    for _ in range(2):
        step()
    early = copy.deepcopy(comm.state_dict())
    for _ in range(2):
        step()
    if world.rank == who:
        CHANGES[change](comm, early)
    words = said(step)
    usable = torch.tensor([float(world.rank)])
    dist.all_reduce(usable)  # nothing is left in the group for others to meet
    comm.close(**({"meet": False} if kind == "local" else {}))
    return words, usable.item()


RULES = [("ddp", "randomk:ratio=0.1"), ("fsdp", "int8"), ("zero", "randomk:ratio=0.1"), ("local", "randomk:ratio=0.1")]
ALSO = [("ddp", rule) for rule in ("auto", "onebit", "factors", "topk:ratio=0.1@gather", "powersgd:rank=2")]


@pytest.mark.parametrize(("kind", "rule"), [*RULES, ("ddp", "auto"), *full(*ALSO[1:])])
@pytest.mark.parametrize("who", [1, *full(0)])
def test_a_state_that_one_rank_loads_alone_is_an_error_on_all_ranks_and_leaves_the_group_usable(
    fleet: Fleet, kind: str, rule: str, who: int
) -> None:
    for rank, (words, usable) in enumerate(fleet.run(2, one_rank_alone, kind, rule, "loads", who, {})):
        assert words.startswith("PlanMismatch: ranks are at different steps: step:")
        assert f"rank {who} has '2'" in words
        assert f"rank {1 - who} has '4'" in words
        assert f"rank {who} has loaded" in words
        assert usable == 1.0, rank


@pytest.mark.parametrize("change", ["discards", "discards_what_was_asked_for"])
@pytest.mark.parametrize(("kind", "rule"), [*RULES[:2], *full(*ALSO)])
def test_a_step_that_one_rank_discards_alone_is_an_error_on_all_ranks(
    fleet: Fleet, kind: str, rule: str, change: str
) -> None:
    for words, usable in fleet.run(3, one_rank_alone, kind, rule, change, 1, {}):
        assert words.startswith("PlanMismatch: ranks are at different steps: step:")
        assert "rank 1 has discarded a step" in words
        assert "rank 1 has '3'" in words
        assert usable == 3.0


def started_over(world: World) -> str:
    """Dense at the first three steps: at step 2 one rank sends other collectives than the others at step 4."""
    module, drawn = model(), iter(range(1000))
    ddp = nn.parallel.DistributedDataParallel(module, process_group=dist.new_group())
    comm = commlib.attach(ddp, "topk:ratio=0.1@gather", min_size=0, dense_steps=3)

    def step() -> None:
        x, y = batch(world, next(drawn))
        nn.functional.cross_entropy(ddp(x), y).backward()

    for _ in range(2):
        step()
    early = copy.deepcopy(comm.state_dict())
    for _ in range(2):
        step()
    if world.rank == 1:
        comm.load_state_dict(early)
    return said(step)


def test_an_error_comes_in_time_where_different_steps_send_different_collectives(fleet: Fleet) -> None:
    for words in fleet.run(2, started_over, deadline=55.0):  # less than the group's
        assert words.startswith("PlanMismatch: ranks are at different steps"), words


def without_its_file(world: World, kind: str, rule: str) -> str:
    comm, step = MAKE[kind](world, rule)
    for _ in range(2):
        step()
    late = copy.deepcopy(comm.state_dict())
    comm.close(**({"meet": False} if kind == "local" else {}))
    comm, step = MAKE[kind](world, rule)
    if world.rank == 0:
        comm.load_state_dict(late)
    return said(step)


@pytest.mark.parametrize(("kind", "rule"), RULES)
def test_a_rank_that_lacks_its_file_is_seen_at_the_first_exchange_of_all(fleet: Fleet, kind: str, rule: str) -> None:
    for words in fleet.run(2, without_its_file, kind, rule):
        assert words.startswith("PlanMismatch: ranks are at different steps: ")
        assert "rank 0 has '2'" in words
        assert "rank 1 has '0'" in words


def all_alike(world: World, kind: str, rule: str) -> list[int]:
    comm, step = MAKE[kind](world, rule)
    for _ in range(2):
        step()
    early = copy.deepcopy(comm.state_dict())
    step()
    comm.load_state_dict(early)
    step()
    step()
    if hasattr(comm, "discard_step"):
        comm.discard_step()
        step()
    comm.close(**({"meet": False} if kind == "local" else {}))
    return []


@pytest.mark.parametrize(("kind", "rule"), RULES)
def test_what_all_ranks_do_alike_is_no_error(fleet: Fleet, kind: str, rule: str) -> None:
    fleet.run(3, all_alike, kind, rule)


def half_of_them(world: World) -> list[str]:
    """Two replicas of two shards; one rank of four loads."""
    trainer = ShardedTrainer(world, "onebit", replicas=2)
    vars(trainer)["finite"] = lambda: True  # it asks all ranks, of which some have given up
    comm, step = trainer.comm, functools.partial(trainer.train, 1)
    step()
    early = copy.deepcopy(comm.state_dict())
    step()
    if world.rank == 3:
        comm.load_state_dict(early)
    words = [said(step), said(step)]  # those of the other shards hear of it now, or as they wait in the second
    comm.close()
    return words


@pytest.mark.full
def test_under_hsdp_the_ranks_that_share_no_group_with_the_one_that_differs_hear_of_it(fleet: Fleet) -> None:
    for words in fleet.run(4, half_of_them):
        assert "ranks are at different steps" in next((w for w in words if w != "nothing"), ""), words


def joined_early(world: World) -> tuple[str, bool]:
    trainer = Trainer(world, "randomk:ratio=0.1")
    said = ""
    try:
        with Join([trainer.ddp]):
            for step in range(2 if world.rank else 5):
                trainer.train(1)
                if step == 3:
                    trainer.comm.discard_step()
    except PlanMismatch as e:
        said = str(e)
    trainer.close()
    return said, same_everywhere(world, trainer.weights())


def test_a_step_discarded_after_other_ranks_have_run_out_of_inputs_is_an_error_on_all(fleet: Fleet) -> None:
    for words, _ in fleet.run(2, joined_early):
        assert "rank 0 has '3', rank 1 has '4'" in words or "rank 1 has '4', rank 0 has '3'" in words
        assert "rank 0 has discarded a step" in words
