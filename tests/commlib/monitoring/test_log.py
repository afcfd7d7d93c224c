"""comm.log_to(…): entries add up to what stats() counts, training stays as it is, and a target that fails is left."""

from __future__ import annotations

import gc
import json
import logging
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import commlib
from commlib.errors import ReplicasDiverged
from commlib.groups.world import World
from commlib.monitoring.error_norms import ErrorNorms
from commlib.monitoring.log import changes
from commlib.monitoring.log_writers import LogFailed
from commlib.planning.planner import make_plan
from commlib.runtime.layers import LayerSpec
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer, batch, heard, says_when_it_waits, torchrun, train_poisoned

EVERY, STEPS = 4, 10


def entries(folder: str | Path, rank: int, kind: str = "step") -> list[dict[str, Any]]:
    path = Path(folder) / ("run.jsonl" if rank == 0 else f"run.rank{rank}.jsonl")
    return [e for e in map(json.loads, path.read_text().splitlines()) if e["kind"] == kind]


def trained(world: World, rule: str, folder: str, style: str) -> dict[str, Any]:
    """A training that is logged from its third step on, beside one that is not."""
    logged, plain = (Trainer(world, rule, style=style) for _ in range(2))
    for trainer in (logged, plain):
        trainer.train(2)
    before = logged.comm.stats()
    with logged.comm.log_to(f"{folder}/run.jsonl", every=EVERY) as log:
        assert log.running
        logged.train(STEPS)
    assert not log.running
    now = logged.comm.stats()
    plain.train(STEPS)
    same = torch.equal(logged.weights(), plain.weights())
    for trainer in (logged, plain):
        trainer.close()
    seconds = {phase: now.seconds[phase] - before.seconds[phase] for phase in now.seconds}
    return {
        "same": same,
        "bytes": now.wire_bytes - before.wire_bytes,
        "dense": now.dense_bytes - before.dense_bytes,
        "seconds": seconds,
        "hooks": logged.comm._monitor.gauge.on,
    }


@pytest.mark.parametrize(
    ("rule", "style"),
    [("onebit@gather", "attach"), ("onebit@scatter_gather", "attach"), ("none", "attach"), ("none", "register")],
)
def test_entries_add_up_to_what_is_counted_and_training_is_the_same(
    fleet: Fleet, tmp_path: Path, rule: str, style: str
) -> None:
    for rank, said in enumerate(fleet.run(2, trained, rule, str(tmp_path), style)):
        (begin,), steps, (end,) = (entries(tmp_path, rank, kind) for kind in ("begin", "step", "end"))
        assert said["same"]
        assert not said["hooks"]
        assert (begin["rank"], begin["ranks"], begin["step"], begin["every"]) == (rank, 2, 2, EVERY)
        assert begin["plan"]["2.weight"].startswith(rule)
        assert [(e["step"], e["steps"], e["skipped"]) for e in steps] == [(6, 4, 0), (10, 4, 0), (12, 2, 0)]
        assert end["step"] == 12
        assert sum(e["bytes"] for e in steps) == pytest.approx(said["bytes"], abs=len(steps))
        assert sum(e["dense_bytes"] for e in steps) == pytest.approx(said["dense"], abs=len(steps))
        for phase, seconds in said["seconds"].items():
            assert sum(e["phases"][phase] for e in steps) == pytest.approx(seconds, rel=1e-4)
        for e in steps:
            assert e["ratio"] == pytest.approx(e["dense_bytes"] / e["bytes"], rel=1e-5)
            assert 0 < e["exposed_ms"] < 1e3 * e["seconds"]
        if rule == "none":
            assert all(e["error"] is None and e["layers"] == {} for e in steps)
            continue
        assert [e["error"] is not None for e in steps] == [True, True, False]  # what stop() leaves was not looked at
        layers = steps[0]["layers"]
        assert set(layers) == set(begin["plan"])
        assert all(0 < held["error"] < 1.5 and held["residual"] > 0 for held in layers.values())
        assert any("owed" in held for held in layers.values()) == (rule == "onebit@scatter_gather")


def looked_at(world: World, folder: str) -> tuple[list[int], list[int]]:
    seen: list[int] = []
    note = ErrorNorms.note

    def noted(self: ErrorNorms, *args: Any) -> None:
        seen.append(args[-1])
        note(self, *args)

    ErrorNorms.note = noted  # type: ignore[assignment, method-assign]
    try:
        trainer = Trainer(world, "onebit")
        trainer.train(3)
        without = list(seen)
        with trainer.comm.log_to(f"{folder}/run.jsonl", every=EVERY):
            trainer.train(9)
        trainer.train(2)
        trainer.close()
    finally:
        ErrorNorms.note = note  # type: ignore[method-assign]
    return without, sorted(set(seen))


def test_errors_are_measured_in_the_steps_that_are_written_down_and_in_no_other(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.run(2, looked_at, str(tmp_path)) == [([], [6, 10])] * 2  # the 7th and the 11th


def waiting(world: World, folder: str, rule: str, nap: float) -> None:
    """Rank 1 is late for every exchange: by so many seconds, from when rank 0 waits."""
    trainer = Trainer(world, rule)
    trainer.train(2)  # before the second one DDP makes up its buckets, which is an exchange of its own
    if world.rank == 0:
        says_when_it_waits(trainer)

    def late(step: int) -> None:
        if world.rank == 1:
            heard(f"waits/{step}")
            time.sleep(nap)

    with trainer.comm.log_to(f"{folder}/run.jsonl", every=5):
        trainer.train(5, late)
    trainer.close()


@pytest.mark.parametrize("rule", ["onebit@gather", "none"])
def test_who_waits_for_another_rank_is_exposed_to_it(fleet: Fleet, tmp_path: Path, rule: str) -> None:
    nap = 0.15
    fleet.run(2, waiting, str(tmp_path), rule, nap)
    (waits,), (naps,) = (entries(tmp_path, rank) for rank in range(2))
    assert waits["exposed_ms"] > 0.99 * 5e3 * nap
    assert waits["exposed_ms"] < 1e3 * waits["seconds"]
    assert naps["exposed_ms"] < 1e3 * naps["seconds"] - 0.99 * 5e3 * nap  # its own naps are no waiting for others


def poisoned(world: World, folder: str) -> None:
    trainer = Trainer(world, "onebit")
    with trainer.comm.log_to(f"{folder}/run.jsonl", every=2):
        train_poisoned(trainer, 6, 3, "0.weight", float("nan"))
    trainer.close()


def test_steps_that_did_not_count_are_told_and_have_no_error(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(2, poisoned, str(tmp_path))
    for rank in range(2):
        steps = entries(tmp_path, rank)
        assert [(e["step"], e["steps"], e["skipped"]) for e in steps] == [(2, 2, 0), (3, 2, 1), (5, 2, 0)]
        assert [e["error"] is None for e in steps] == [False, True, False]


def replanned(world: World, folder: str) -> None:
    """The plan is another one after the third step, and nobody asks for it before the sixth is written down."""
    trainer = Trainer(world, "onebit")
    comm = trainer.comm
    with comm.log_to(f"{folder}/run.jsonl", every=6):
        trainer.train(3)
        specs = [p.spec for p in comm.plan]
        comm._plan = make_plan(specs, {"2.*": "topk:ratio=0.1", "*": "onebit"}, world=2, min_size=0)
        trainer.train(3)
    trainer.close()


def test_changes_of_the_plan_are_told_with_the_step_after_which_they_were_seen(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(2, replanned, str(tmp_path))
    for rank in range(2):
        (e,) = entries(tmp_path, rank)
        assert [(c["layer"], c["from"], c["to"]) for c in e["changes"]] == [
            (name, "onebit@gather", "topk:ratio=0.1@gather") for name in ("2.weight", "2.bias")
        ]
        assert {c["step"] for c in e["changes"]} == {4}
        assert {c["reason"] for c in e["changes"]} == {"rule '2.*'"}


def test_a_plan_that_is_made_anew_alike_is_no_change() -> None:
    specs = [LayerSpec("a", (64, 64)), LayerSpec("b", (64, 64))]
    one, same, other = (make_plan(specs, rule, world=2, min_size=0) for rule in ("onebit", "onebit", "fp16"))
    assert changes(one, same, 3) == []
    assert [c["layer"] for c in changes(one, other, 3)] == ["a", "b"]


def resumed(world: World, folder: str) -> None:
    first = Trainer(world, "onebit")
    first.comm.log_to(f"{folder}/run.jsonl", every=2)
    first.train(4)
    state = first.comm.state_dict()
    first.close()
    again = Trainer(world, "onebit")
    again.comm.log_to(f"{folder}/run.jsonl", every=2)
    again.comm.load_state_dict(state)
    again.train(3)
    again.close()


def test_a_run_that_is_resumed_goes_on_in_its_file_with_its_count(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(2, resumed, str(tmp_path))
    for rank in range(2):
        assert [e["step"] for e in entries(tmp_path, rank)] == [2, 4, 6, 7]
        assert len(entries(tmp_path, rank, "begin")) == len(entries(tmp_path, rank, "end")) == 2


class Broken:
    """A writer that was closed."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        raise RuntimeError("the writer is closed")


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def failing(world: World, folder: str) -> tuple[list[str], int]:
    heard = Heard()
    log = logging.getLogger("commlib")
    log.addHandler(heard)
    try:
        trainer = Trainer(world, "onebit")
        os.symlink("/dev/full", f"{folder}/full-{world.rank}.jsonl")
        targets = (f"{folder}/full-{{rank}}.jsonl", Broken(), f"{folder}/run.jsonl")
        with trainer.comm.log_to(*targets, every=2):
            trainer.train(6)
        trainer.close()
    finally:
        log.removeHandler(heard)
    return heard.said, trainer.comm.stats().steps


def test_a_full_disk_and_a_closed_writer_are_told_once_and_left_and_training_and_other_targets_go_on(
    fleet: Fleet, tmp_path: Path
) -> None:
    for rank, (said, steps) in enumerate(fleet.run(2, failing, str(tmp_path))):
        assert steps == 6
        assert len(said) == 2
        assert f"rank {rank}" in said[0]
        assert "No space left on device" in said[0]
        assert "Broken cannot be written, and is not logged to any more: the writer is closed" in said[1]
        assert [e["step"] for e in entries(tmp_path, rank)] == [2, 4, 6]


def diverging(world: World, folder: str) -> None:
    trainer = Trainer(world, "none", check_replicas=2)
    trainer.comm.log_to(f"{folder}/run.jsonl", every=1)
    trainer.train(3)
    if world.rank == 1:
        with torch.no_grad():
            next(trainer.module[0].parameters())[2, 3] += 1.0
    with pytest.raises(ReplicasDiverged):
        trainer.train(1)
    trainer.close()


def test_when_replicas_were_equal_and_that_they_differ_is_in_every_ranks_log(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(2, diverging, str(tmp_path))
    for rank in range(2):
        assert [e["checked"] for e in entries(tmp_path, rank)] == [None, 1, 1]
        (said,) = entries(tmp_path, rank, "diverged")
        assert (said["layer"], said["step"], said["holders"]) == ("0.weight", 3, [[0], [1]])
        assert len(entries(tmp_path, rank, "end")) == 1


def misused(world: World, folder: str) -> None:
    trainer = Trainer(world, "onebit")
    comm = trainer.comm
    for every in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="every must be"):
            comm.log_to(f"{folder}/run.jsonl", every=every)
    with pytest.raises(ValueError, match="a log needs a target"):
        comm.log_to()
    with pytest.raises(TypeError, match="a path or a SummaryWriter"):
        comm.log_to(f"{folder}/a.jsonl", 5)
    with pytest.raises(LogFailed):
        comm.log_to(f"{folder}/b.jsonl", f"{folder}/none/a.jsonl")
    log = comm.log_to(f"{folder}/run.jsonl")
    with pytest.raises(ValueError, match="a log is running already"):
        comm.log_to(f"{folder}/run.jsonl")
    log.stop()
    log.stop()
    comm.log_to(f"{folder}/run.jsonl").stop()
    trainer.close()


def test_bad_arguments_are_refused_and_nothing_is_logged_then(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(1, misused, str(tmp_path))
    assert [e["kind"] for k in ("begin", "end") for e in entries(tmp_path, 0, k)] == ["begin"] * 2 + ["end"] * 2


def forgotten(world: World, folder: str) -> bool:
    trainer = Trainer(world, "onebit")
    trainer.comm.log_to(f"{folder}/run.jsonl")
    trainer.train(2)
    net = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))  # whose state nobody keeps: not that of the trainer
    state = commlib.HookState(net, "none", check_replicas=5)
    state.log_to(f"{folder}/other.jsonl")
    gone = weakref.ref(state)
    del state, net
    gc.collect()
    trainer.close()
    return gone() is None


def test_a_log_keeps_nobody_alive_and_ends_with_whom_it_is_of(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.run(1, forgotten, str(tmp_path)) == [True]
    assert [json.loads(x)["kind"] for x in (tmp_path / "other.jsonl").read_text().splitlines()] == ["begin", "end"]
    assert [e["step"] for e in entries(tmp_path, 0)] == [2]


def interrupted(world: World, folder: str) -> None:
    trainer = Trainer(world, "onebit")
    log = trainer.comm.log_to(f"{folder}/run.jsonl", every=2)
    trainer.train(3)
    trainer.comm._steps.begin(remembers=True)
    trainer.comm._steps.submitted(torch.futures.Future(), last=True)  # of a rank that is gone: it is never done
    log.stop()
    trainer.close()


def test_a_log_that_ends_in_the_middle_of_an_exchange_does_not_wait_for_it(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(1, interrupted, str(tmp_path))
    assert [e["step"] for e in entries(tmp_path, 0)] == [2]
    assert len(entries(tmp_path, 0, "end")) == 1


def by_nodes(world: World, folder: str) -> None:
    with torchrun(world, 2):
        trainer = Trainer(world, "onebit", hierarchy=True, check_replicas=3)
    with trainer.comm.log_to(f"{folder}/run.jsonl", every=2):
        trainer.train(4)
    trainer.close()


def test_under_a_hierarchy_residuals_are_known_and_errors_are_not(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(4, by_nodes, str(tmp_path))
    for rank in range(4):
        steps = entries(tmp_path, rank)
        assert [(e["step"], e["checked"]) for e in steps] == [(2, None), (4, 2)]
        for e in steps:
            assert e["error"] is None
            assert e["layers"]["0.weight"]["error"] is None
            assert e["layers"]["0.weight"]["residual"] > 0


def scaled(world: World, folder: str) -> None:
    for scale in (1.0, 1024.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2) if scale > 1 else None
        trainer = Trainer(world, "onebit", scaler=scaler)
        with trainer.comm.log_to(f"{folder}/run.jsonl", every=3):
            trainer.train(6)
        trainer.close()


def test_a_loss_scale_that_moves_changes_nothing_of_what_is_said(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(2, scaled, str(tmp_path))
    for rank in range(2):
        one, two, three, four = entries(tmp_path, rank)
        for plain, amp in ((one, three), (two, four)):
            assert amp["error"] == pytest.approx(plain["error"], rel=1e-4)
            for name, held in plain["layers"].items():
                assert amp["layers"][name] == pytest.approx(held, rel=1e-4)


def uneven(world: World, folder: str) -> None:
    trainer = Trainer(world, "onebit")
    with trainer.comm.log_to(f"{folder}/run.jsonl", every=2), Join([trainer.ddp]):
        for step in range(2 + 4 * world.rank):
            x, y = batch(world, step)
            trainer.optimizer.zero_grad()
            nn.functional.cross_entropy(trainer.ddp(x), y).backward()
            trainer.optimizer.step()
    trainer.close()


def test_a_rank_that_has_joined_logs_its_own_steps_only(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(2, uneven, str(tmp_path))
    assert [e["step"] for e in entries(tmp_path, 0)] == [2]
    assert [e["step"] for e in entries(tmp_path, 1)] == [2, 4, 6]
