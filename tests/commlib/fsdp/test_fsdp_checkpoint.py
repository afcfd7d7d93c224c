"""Residuals of a sharded model in a distributed checkpoint: exact to resume, conserved on another mesh."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import commlib
from commlib.errors import CheckpointMismatch
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import Trainer
from tests.support.tiny_fsdp import ShardedTrainer


def store(trainer: ShardedTrainer, folder: str) -> None:
    state = {
        "model": trainer.model.state_dict(),
        "optimizer": get_optimizer_state_dict(trainer.model, trainer.optimizer),
        "comm": trainer.comm.state_dict(),
    }
    save(state, checkpoint_id=folder)


def restore(trainer: ShardedTrainer, folder: str) -> None:
    state = {
        "model": trainer.model.state_dict(),
        "optimizer": get_optimizer_state_dict(trainer.model, trainer.optimizer),
    }
    load(state, checkpoint_id=folder)
    trainer.model.load_state_dict(state["model"])
    set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"])
    trainer.comm.load_state_dict(commlib.read_state(folder, trainer.comm))


def resumed(world: World, folder: str, rules: list[str], replicas: int) -> list[str]:
    wrong = []
    for i, rule in enumerate(rules):
        options: dict[str, Any] = {"replicas": replicas, "parameters": "int8", "more": _odd}
        straight = ShardedTrainer(world, rule, **options)
        straight.train(8)
        first = ShardedTrainer(world, rule, **options)
        first.train(4)
        store(first, f"{folder}/{i}")
        second = ShardedTrainer(world, rule, **options)
        restore(second, f"{folder}/{i}")
        second.step = 4
        second.train(4)
        if not torch.equal(straight.weights(), second.weights()):
            wrong.append(f"{rule}: weights")
        if second.comm.stats().steps != 8 or not _same(straight.comm.state_dict(), second.comm.state_dict()):
            wrong.append(f"{rule}: residuals or steps")
        for trainer in (straight, first, second):
            trainer.close()
    return wrong


def _odd(step: int) -> bool:
    return step % 2 == 1


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["ranks"].keys() == b["ranks"].keys() and all(
        torch.equal(entry["value"], b["ranks"][rank][name][key]["value"])
        for rank in a["ranks"]
        for name, slots in a["ranks"][rank].items()
        for key, entry in slots.items()
    )


@pytest.mark.parametrize(("size", "replicas"), [(2, 1), *full((4, 2))])
def test_a_run_resumes_bit_for_bit(fleet: Fleet, tmp_path: Path, size: int, replicas: int) -> None:
    rules = ["onebit", "topk:ratio=0.1", "qsgd"] if replicas == 1 else ["onebit@gather", "int8@scatter_gather"]
    assert fleet.run(size, resumed, str(tmp_path), rules, replicas) == [[]] * size


def owing(world: World, folder: str, replicas: int) -> dict[str, Tensor]:
    trainer = ShardedTrainer(world, "onebit@gather" if replicas > 1 else "onebit", replicas=replicas)
    trainer.train(4)
    store(trainer, folder)
    trainer.close()
    return owed_by(world, trainer)


def taken_over(world: World, folder: str, replicas: int, rule: str) -> dict[str, Tensor]:
    trainer = ShardedTrainer(world, rule, replicas=replicas)
    trainer.comm.load_state_dict(commlib.read_state(folder, trainer.comm))
    assert trainer.comm.stats().steps == 4
    found = owed_by(world, trainer)
    trainer.train(2)
    trainer.close()
    return found


def owed_by(world: World, trainer: ShardedTrainer) -> dict[str, Tensor]:
    """Layer → what all ranks together would still add to the mean gradient, whole."""
    states: list[Any] = [None] * world.size
    dist.all_gather_object(states, trainer.comm.state_dict())
    merged = commlib.merge_state_dicts(states)
    weight = 1 / len(merged["nodes"].split()) if "nodes" in merged else 1 / world.size
    total = {n: torch.zeros(*map(int, about.split()[0].split("x"))) for n, about in merged["layers"].items()}
    for entries in merged["ranks"].values():
        for name, slots in entries.items():
            for entry in slots.values():
                rows = entry["value"]
                total[name][entry["start"] : entry["start"] + len(rows)] += rows * weight
    return total


MOVES = [
    ((4, 1), (2, 1), "onebit"),
    ((2, 1), (3, 1), "int8"),
    ((2, 1), (2, 1), "none"),  # what is held back goes out with the next gradients
    ((4, 2), (2, 1), "onebit"),
    ((2, 1), (4, 2), "onebit@gather"),
]


@pytest.mark.parametrize(("old", "new", "rule"), [*MOVES[1:3], *full(MOVES[0], *MOVES[3:])], ids=str)
def test_on_another_mesh_nothing_that_is_owed_is_lost(
    fleet: Fleet, tmp_path: Path, old: tuple[int, int], new: tuple[int, int], rule: str
) -> None:
    before = fleet.run(old[0], owing, str(tmp_path), old[1])[0]
    after = fleet.run(new[0], taken_over, str(tmp_path), new[1], rule)[0]
    assert before.keys() == after.keys()
    assert any(float(v.abs().max()) > 0 for v in before.values())
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6)


def ddp_resumed(world: World, folder: str) -> bool:
    """The same reader for a replicated model."""
    straight, first, second = (Trainer(world, "onebit") for _ in range(3))
    straight.train(6)
    first.train(3)
    save({"comm": first.comm.state_dict()}, checkpoint_id=folder)
    second.module.load_state_dict(first.module.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.comm.load_state_dict(commlib.read_state(folder, second.comm))
    second.step = 3
    second.train(3)
    for trainer in (straight, first, second):
        trainer.close()
    return torch.equal(straight.weights(), second.weights())


def test_it_reads_the_state_of_a_ddp_model_too(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.run(2, ddp_resumed, str(tmp_path)) == [True, True]


class _Alone:
    world = World(0, 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_checkpoint_of_ours_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="no distributed checkpoint that can be read"):
        commlib.read_state(tmp_path / "nothing", _Alone())
    with tempfile.TemporaryDirectory() as folder:
        save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder, no_dist=True)
        with pytest.raises(CheckpointMismatch, match=r"no state of commlib under 'comm' \(it has: \['model'\]\)"):
            commlib.read_state(folder, _Alone())
