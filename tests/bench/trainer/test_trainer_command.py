"""``commlib train`` from flags to table, with real ranks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commlib.bench.launch.processes import RankFailed, run_ranks
from commlib.bench.trainer.settings import TrainSettings
from commlib.bench.trainer.tasks import BadInput
from commlib.bench.trainer.worker import RunProgress
from commlib.bench.trainer.worker import main as rank_main

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--task", "digit"], "unknown task 'digit' (known: cifar, digits, text; did you mean 'digits'?)"),
        (["--comm", "none", "--comm", "topk:ratio=2"], "--comm topk:ratio=2: "),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--steps", "-5"], "--steps must be above 0, got -5"),
        (["--limit", "50m"], "--limit: a rate is a number and kbit, mbit or gbit, as 200mbit; got '50m'"),
        (["--limit", "0mbit"], "--limit: a rate must be more than nothing, got '0mbit'"),
        (["--resume"], "--resume needs --checkpoint FOLDER"),
        (["--task", "text", "--data", "/nowhere/at.all"], "/nowhere/at.all: no such file"),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(call: Call, args: list[str], said: str) -> None:
    code, out, err = call("train", *args)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("error: ")


def test_what_only_a_rank_can_see_is_one_line_too(call: Call) -> None:
    code, out, err = call("train", "--batch", "5000")
    assert (code, out) == (2, "")
    assert err == ("error: 1437 examples do not fill one step of 2 ranks × --batch 5000: lower --batch or --ranks\n")


@pytest.mark.full
def test_a_limit_and_a_hierarchy_on_one_node_are_in_the_json_which_says_why_it_is_flat(
    call: Call,
) -> None:
    code, out, err = call("train", "--json", "--steps", "3", "--comm", "none", "--limit", "200mbit", "--hierarchy")
    assert code == 0, err
    report = json.loads(out)
    assert (report["limit"], report["hierarchy"]) == ("200mbit", True)
    assert report["runs"][0]["levels"] == "flat: all ranks (2) are on one node"


def two_by_two(rank: int) -> dict[str, str]:
    return {"GROUP_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.full
def test_two_levels_are_trained_on_and_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path, "hierarchy": True, "comms": ("onebit",)}
    run_ranks(rank_main, 4, (TrainSettings(**options, steps=6),), env=two_by_two)
    for report in run_ranks(rank_main, 4, (TrainSettings(**options, steps=9, resume=True),), env=two_by_two):
        (run,) = report["runs"]
        assert run["levels"] == "2 nodes of 2"
        assert run["steps"] == 9
        assert run["replicas_equal"]


@pytest.mark.full
def test_an_environment_that_makes_no_nodes_is_bad_input_and_says_what_does() -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(rank_main, 2, (TrainSettings(steps=3, hierarchy=True),), env=lambda rank: {"LOCAL_RANK": "0"})
    assert isinstance(failed.value.error, BadInput)
    assert "ranks 0 and 1 both say LOCAL_RANK 0 on node 0" in str(failed.value)


def test_json_of_codecs_and_seeds(call: Call) -> None:
    code, out, err = call("train", "--json", "--seeds", "2", "--steps", "60", "--comm", "none", "--comm", "onebit")
    assert code == 0, err
    report = json.loads(out)
    assert {k: report[k] for k in ("task", "ranks", "backend", "device", "steps", "batch_per_rank")} == {
        "task": "digits", "ranks": 2, "backend": "gloo", "device": "cpu", "steps": 60, "batch_per_rank": 32,
    }  # fmt: skip
    runs: list[dict[str, Any]] = report["runs"]
    assert [(r["comm"], r["seed"]) for r in runs] == [("none", 0), ("none", 1), ("onebit", 0), ("onebit", 1)]
    assert len({r["weights"] for r in runs}) == 4
    for r in runs:
        assert r["replicas_equal"] is True
        assert r["accuracy"] > 70
        assert r["ms_per_step"] > 0
        assert r["dense_bytes_per_step"] == pytest.approx(4 * 301_066)
        assert r["ratio"] == pytest.approx(r["dense_bytes_per_step"] / r["wire_bytes_per_step"])
    assert runs[0]["ratio"] == 1.0
    assert runs[2]["ratio"] > 15
    assert runs[2]["big_ratio"] > 25
    assert [s["comm"] for s in report["summary"]] == ["none", "onebit"]
    assert report["summary"][0]["accuracy"]["sd"] is not None


@pytest.mark.full
@pytest.mark.usefixtures("warm_python")
def test_table_of_a_run_that_torchrun_started(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = ["-m", "commlib.bench.trainer", "--steps", "20", "--comm", "none", "--comm", "onebit"]
    done = subprocess.run([*launcher, *flags], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "301,066 parameters" in done.stdout
    assert "2 ranks over gloo on cpu" in done.stdout
    assert "20 steps of 32 × 2 examples" in done.stdout
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.count(".") >= 4}
    assert list(rows) == ["none", "onebit"]
    assert rows["none"][4:] == ["1,204,264", "1.0", "1.0"]
    assert float(rows["onebit"][5]) > 15


def test_text_learns_a_file_by_epochs(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 150, encoding="utf-8")
    settings = TrainSettings(task="text", data=path, hidden=64, epochs=8, batch=4, comms=("none",))
    steps: list[RunProgress] = []
    run = run_ranks(rank_main, 2, (settings,), on_message=lambda r, m: steps.append(m), timeout=300)[0]["runs"][0]
    assert run["steps"] == 8 * (94 // 8)
    assert run["loss"] < 2.5
    assert (steps[-1].step, steps[-1].total) == (88, 88)


@pytest.mark.full
def test_cifar_reads_an_archive_of_jpegs_with_amp(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    write_images(path, train=64, test=16)
    settings = TrainSettings(task="cifar", data=path, hidden=32, steps=12, batch=8, amp=True, comms=("onebit",))
    report = run_ranks(rank_main, 2, (settings,), timeout=300)[0]
    assert (report["train_examples"], report["test_examples"]) == (64, 16)
    assert report["runs"][0]["accuracy"] > 60  # red or blue


def write_images(path: Path, **counts: int) -> None:
    """Red and blue images in the format the task reads."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"classes": np.array(["red", "blue"])}
    for part, n in counts.items():
        files, labels = [], (np.arange(n) % 2).astype(np.uint8)
        for label in labels:
            pixels = rng.integers(0, 80, (32, 32, 3), dtype=np.uint8)
            pixels[..., 2 * label] += 150
            buffer = io.BytesIO()
            image.fromarray(pixels).save(buffer, "JPEG")
            files.append(buffer.getvalue())
        arrays[f"{part}_jpeg"] = np.frombuffer(b"".join(files), dtype=np.uint8)
        arrays[f"{part}_offsets"] = np.cumsum([0, *map(len, files)], dtype=np.int64)
        arrays[f"{part}_labels"] = labels
    np.savez(path, **arrays)


def test_cifar_names_what_is_odd(tmp_path: Path) -> None:
    from commlib.bench.trainer.tasks import BadInput, load_task

    path = tmp_path / "images.npz"
    write_images(path, train=4, test=2)
    arrays = dict(np.load(path))
    for change, said in (
        ({"train_labels": np.array([0, 1, 2, 0], np.uint8)}, "train_labels reach 2 for 2 classes"),
        ({"test_offsets": arrays["test_offsets"][:-1]}, "test_offsets is int64 of shape"),
        ({"train_jpeg": arrays["train_jpeg"][::-1]}, "train image 0 cannot be decoded"),
    ):
        np.savez(path, **{**arrays, **change})
        with pytest.raises(BadInput, match=f"images.npz: {said}.*; expected an .npz"):
            load_task("cifar", path, None)
