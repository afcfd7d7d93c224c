"""comm.log_to(…) of a sharded model: what it costs and what is late, and training stays as it is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import heard, says_when_it_waits
from tests.support.tiny_fsdp import Network, ShardedTrainer, batch


def entries(folder: str | Path, rank: int) -> list[dict[str, Any]]:
    name = "run.jsonl" if rank == 0 else f"run.rank{rank}.jsonl"
    return [e for e in map(json.loads, (Path(folder) / name).read_text().splitlines()) if e["kind"] == "step"]


def logged(world: World, rule: str, replicas: int, folder: str) -> dict[str, Any]:
    """Ranks but the last log; a training without a log goes beside."""
    options: dict[str, Any] = {} if rule == "nothing" else {"parameters": "int8"}
    rule = "none" if rule == "nothing" else rule
    seen, unseen = (ShardedTrainer(world, rule, replicas=replicas, **options) for _ in range(2))
    before = seen.comm.stats()
    log = seen.comm.log_to(f"{folder}/run.jsonl", every=3) if world.rank < world.size - 1 else None
    for trainer in (seen, unseen):
        trainer.train(7)
    if log is not None:
        log.stop()
    now = seen.comm.stats()
    same = torch.equal(seen.weights(), unseen.weights())
    for trainer in (seen, unseen):
        trainer.close()
    return {
        "same": same,
        "bytes": now.wire_bytes - before.wire_bytes,
        "dense": now.dense_bytes - before.dense_bytes,
        "gauge": seen.comm._monitor.gauge.on,
    }


@pytest.mark.parametrize("rule", ["onebit", *full("none", "nothing")])
@pytest.mark.parametrize(("size", "replicas"), [(2, 1), *full((4, 2))])
def test_entries_add_up_and_training_is_the_same_whoever_logs(
    fleet: Fleet, tmp_path: Path, rule: str, size: int, replicas: int
) -> None:
    for rank, said in enumerate(fleet.run(size, logged, rule, replicas, str(tmp_path))):
        assert said["same"]
        assert not said["gauge"]
        if rank == size - 1:
            assert not (tmp_path / f"run.rank{rank}.jsonl").exists()
            continue
        steps = entries(tmp_path, rank)
        assert [(e["step"], e["steps"]) for e in steps] == [(3, 3), (6, 3), (7, 1)]
        assert sum(e["bytes"] for e in steps) == pytest.approx(said["bytes"], abs=len(steps))
        assert sum(e["dense_bytes"] for e in steps) == pytest.approx(said["dense"], abs=len(steps))
        assert all(e["ratio"] > 3 if rule == "onebit" else e["ratio"] == 1 for e in steps)
        assert all(e["exposed_ms"] > 0 for e in steps)


def measured(world: World, folder: str) -> dict[str, tuple[float, float]]:
    """Layer → norms of a local gradient and of what is held back of it after the first step."""
    trainer = ShardedTrainer(world, "onebit")
    with trainer.comm.log_to(f"{folder}/run.jsonl", every=1):
        trainer.train(1)
    held = trainer.comm.state_dict()["ranks"][str(world.rank)]
    trainer.close()
    local, (x, y) = Network(), batch(world.rank, 0)
    nn.functional.cross_entropy(local(x), y).backward()
    return {
        name: (float(p.grad.norm()), float(held[name]["residual"]["value"].norm()))
        for name, p in local.named_parameters()
        if p.grad is not None
    }


def test_errors_are_what_is_left_of_what_there_was(fleet: Fleet, tmp_path: Path) -> None:
    for rank, norms in enumerate(fleet.run(2, measured, str(tmp_path))):
        (entry,) = entries(tmp_path, rank)
        assert entry["layers"].keys() == norms.keys()
        for name, (there, left) in norms.items():
            assert left > 0
            assert entry["layers"][name]["residual"] == pytest.approx(left, rel=1e-4)
            assert entry["layers"][name]["error"] == pytest.approx(left / there, rel=1e-4)
        all_there, all_left = (sum(n**2 for n in column) ** 0.5 for column in zip(*norms.values(), strict=True))
        assert entry["error"] == pytest.approx(all_left / all_there, rel=1e-4)


def waited(world: World, rule: str, folder: str) -> None:
    trainer = ShardedTrainer(world, rule)
    with trainer.comm.log_to(f"{folder}/run.jsonl", every=1):
        trainer.train(1)
        if world.rank == 0:
            says_when_it_waits(trainer)
        else:
            heard("waits/1")
            time.sleep(0.3)
        trainer.train(1)
    trainer.close()


@pytest.mark.parametrize("rule", ["int8", "none"])
def test_who_waits_for_another_rank_is_exposed_to_it(fleet: Fleet, tmp_path: Path, rule: str) -> None:
    fleet.run(2, waited, rule, str(tmp_path))
    assert entries(tmp_path, 0)[1]["exposed_ms"] > 297


def skipped(world: World, folder: str) -> None:
    trainer = ShardedTrainer(world, "onebit")
    with trainer.comm.log_to(f"{folder}/run.jsonl", every=1):
        trainer.train(3, {1: float("inf")})
    trainer.close()


def test_steps_that_did_not_count_are_told_and_have_no_error(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(2, skipped, str(tmp_path))
    for rank in range(2):
        assert [(e["step"], e["skipped"]) for e in entries(tmp_path, rank)] == [(1, 0), (1, 1), (2, 0)]
        assert [e["error"] is None for e in entries(tmp_path, rank)] == [False, True, False]


def ended(world: World, folder: str) -> list[bool]:
    trainer = ShardedTrainer(world, "onebit")
    log, twice = trainer.comm.log_to(f"{folder}/run.jsonl"), False
    try:
        trainer.comm.log_to(f"{folder}/other.jsonl")
    except ValueError as e:
        twice = "a log is running already" in str(e)
    trainer.comm.detach()
    return [twice, not log.running]


def test_a_second_log_is_refused_and_detach_ends_the_first(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.run(2, ended, str(tmp_path)) == [[True, True]] * 2
