"""comm.trace(path): what a rank did is in its file, and the training stays as it is."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import commlib
from commlib.exchange import chunking
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer, train_poisoned
from tests.support.trace_reader import inside, spans

STEPS = 4


def file(folder: str, rank: int) -> Path:
    return Path(folder) / ("t.json" if rank == 0 else f"t.rank{rank}.json")


def trained(world: World, rule: Any, folder: str, style: str) -> tuple[Tensor, Tensor]:
    """Weights of a training that was traced, and of one that was not."""
    ends = []
    for traced in (True, False):
        trainer = Trainer(world, rule, style=style)
        trainer.train(2)
        with trainer.comm.trace(f"{folder}/t.json") if traced else contextlib.nullcontext():
            trainer.train(STEPS)
        trainer.train(1)
        ends.append(trainer.weights())
        trainer.close()
    return ends[0], ends[1]


@pytest.mark.parametrize(
    ("rule", "phases"),
    [
        ("none", {"wire"}),
        ("onebit@scatter_gather", {"wire", "compress", "decompress", "decompress, compress"}),
        ("powersgd:rank=2@low_rank", {"wire", "compress", "decompress", "decompress, compress"}),
        ("topk:ratio=0.1@gather", {"wire", "compress", "decompress"}),
    ],
)
def test_each_ranks_file_has_passes_and_every_buckets_life_and_training_is_the_same(
    fleet: Fleet, tmp_path: Path, rule: str, phases: set[str]
) -> None:
    for traced, untraced in fleet.run(2, trained, rule, str(tmp_path), "register"):
        assert torch.equal(traced, untraced)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json", "t.rank1.json"]
    for rank in range(2):
        rows = spans(file(str(tmp_path), rank))
        buckets = sorted(row for row in rows if row.startswith("bucket"))
        assert buckets == ["bucket 0", "bucket 1"]
        training = rows["training"]
        assert set(training) == {"recording", "forward", "backward", "wait"}
        assert [len(training[name]) for name in ("forward", "backward", "wait")] == [STEPS] * 3
        for passes in zip(training["forward"], training["backward"], training["wait"], strict=True):
            times = [t for begin_and_end in passes for t in begin_and_end]
            assert times == sorted(times)
        for name in buckets:
            row = rows[name]
            assert set(row) == {name} | phases
            assert len(row[name]) == STEPS
            for step, life in enumerate(row[name]):
                assert training["backward"][step][0] < life[0] < training["backward"][step][1]
                assert life[1] <= training["wait"][step][1]
                wires = [w for w in row["wire"] if inside(w, life)]
                assert len(wires) == len(row["wire"]) / STEPS > 0
            for phase in phases:
                assert all(any(inside(each, life) for life in row[name]) for each in row[phase])


def in_parts(world: World, folder: str) -> None:
    size, chunking.SIZE = chunking.SIZE, 4096
    try:
        trainer = Trainer(world, "onebit@gather", cap=10)
        trainer.train(1)
        with trainer.comm.trace(f"{folder}/t.json"):
            trainer.train(STEPS)
        trainer.close()
    finally:
        chunking.SIZE = size


def test_parts_of_a_bucket_have_a_row_each(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(2, in_parts, str(tmp_path))
    for rank in range(2):
        rows = spans(file(str(tmp_path), rank))
        names = [row for row in rows if row != "training"]
        assert sorted(names) == [f"part {i} of bucket 0" for i in range(3)]
        for name in names:
            assert set(rows[name]) == {name, "compress", "wire", "decompress"}
            for phase in ("compress", "wire", "decompress"):
                assert len(rows[name][phase]) == STEPS
                assert all(inside(x, life) for x, life in zip(rows[name][phase], rows[name][name], strict=True))


def without_a_hook(world: World, folder: str) -> tuple[bool, int, int]:
    trainer = Trainer(world, "none")
    trainer.train(3)
    with trainer.comm.trace(f"{folder}/t.json"):
        trainer.train(STEPS)
        hooked = bool(trainer.ddp._comm_hooks)
    trainer.train(1)
    parameters: list[Any] = list(trainer.module.parameters())
    hooks = sum(len(p._post_accumulate_grad_hooks or ()) for p in parameters)
    return hooked, hooks, trainer.comm.stats().steps


def test_without_a_hook_ddps_exchange_is_seen_as_one_and_what_looks_on_goes_again(fleet: Fleet, tmp_path: Path) -> None:
    for hooked, hooks, steps in fleet.run(2, without_a_hook, str(tmp_path)):
        assert not hooked
        assert hooks == 1  # that of attach() itself
        assert steps == 3 + STEPS + 1
    for rank in range(2):
        rows = spans(file(str(tmp_path), rank))
        assert set(rows) == {"training", "buckets"}
        training, buckets = rows["training"], rows["buckets"]
        assert [len(training[name]) for name in ("forward", "backward", "wait")] == [STEPS] * 3
        for i in range(2):
            assert len(buckets[f"bucket {i} handed over"]) == STEPS
        assert len(buckets["exchange by DDP"]) == STEPS
        for step, exchange in enumerate(buckets["exchange by DDP"]):
            backward, wait = training["backward"][step], training["wait"][step]
            assert exchange[0] == buckets["bucket 0 handed over"][step][0]
            assert backward[0] < exchange[0] < backward[1] <= wait[0] <= wait[1] == exchange[1]


def poisoned(world: World, folder: str) -> int:
    trainer = Trainer(world, "onebit")
    with trainer.comm.trace(f"{folder}/t.json"):
        train_poisoned(trainer, STEPS, 1, "0.weight", float("nan"))
    skipped: int = trainer.comm.stats().skipped
    trainer.close()
    return skipped


def test_a_step_that_was_not_finite_is_marked(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.run(2, poisoned, str(tmp_path)) == [1, 1]
    for rank in range(2):
        training = spans(file(str(tmp_path), rank))["training"]
        ((at, _),) = training["skipped the step before"]
        assert training["wait"][1][1] <= at <= training["wait"][2][0]


def managed(world: World, folder: str) -> None:
    trainer = Trainer(world, commlib.Exact())
    with trainer.comm.trace(f"{folder}/t.json"):
        while not trainer.comm.settled:
            trainer.train(1)
    trainer.close()


def test_the_managers_reviews_and_what_it_says_are_there(fleet: Fleet, tmp_path: Path) -> None:
    fleet.run(2, managed, str(tmp_path))
    seen = [spans(file(str(tmp_path), rank))["manager"] for rank in range(2)]
    assert len(seen[0]["review"]) == len(seen[1]["review"]) >= 1
    assert set(seen[0]) == set(seen[1])
    assert "steady" in seen[0]


def named(world: World, folder: str) -> list[str]:
    """Files that ranks ask for; rank 2 does not take part."""
    trainer = Trainer(world, "onebit")
    os.chdir(folder)
    if world.rank != 2:
        with trainer.comm.trace("of-{rank}.json"):
            trainer.train(1)
        with trainer.comm.trace("t.json") as recording:
            trainer.train(1)
        assert recording.path == file(folder, world.rank)
    else:
        trainer.train(2)
    trainer.close()
    os.chdir("/")
    return []


def test_each_rank_that_asks_has_a_file_of_its_own_and_one_command_makes_one_of_them(
    fleet: Fleet, tmp_path: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    fleet.run(3, named, str(tmp_path))
    made = ["of-0.json", "of-1.json", "t.json", "t.rank1.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == made
    whole = tmp_path / "all.json"
    code, out, _ = call("trace", "merge", *(str(tmp_path / n) for n in made[2:]), "--into", str(whole))
    assert (code, out) == (0, f"{whole}: 2 traces; https://ui.perfetto.dev opens it\n")
    events = json.loads(whole.read_text())["traceEvents"]
    backward = {e["pid"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "backward"}
    waits = {e["pid"]: e["ts"] + e["dur"] for e in events if e["name"] == "wait"}
    assert set(backward) == {0, 1}
    # no rank's wait ends before the other's first bucket could leave: they are on one time
    assert all(waits[rank] > backward[1 - rank][0] for rank in (0, 1))
    code, _, err = call("trace", "merge", str(tmp_path / "none.json"), "--into", str(whole))
    assert code == 2
    assert "none.json cannot be read" in err
