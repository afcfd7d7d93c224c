"""``commlib train --task sparse-logistic``, from flags to figures, with real processes over ZeroMQ."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from commlib.bench.launch.processes import RankFailed, run_ranks
from commlib.bench.sparse_logistic import processes, report
from commlib.bench.sparse_logistic.command import FILTERS
from commlib.bench.sparse_logistic.generate import Generated
from commlib.bench.sparse_logistic.settings import SparseSettings
from commlib.server.membership import rendezvous

Call = Callable[..., tuple[int, str, str]]
TASK = ("train", "--task", "sparse-logistic")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = Generated(examples=300, features=200, drawn=10, true=12, seed=2).rows()
    path = tmp_path / "small.svm"
    with path.open("w") as f:
        for i, label in enumerate(rows.labels.tolist()):
            entries = range(int(rows.starts[i]), int(rows.starts[i + 1]))
            f.write(f"{label:+g} " + " ".join(f"{rows.keys[e] + 1}:{rows.values[e]:.9g}" for e in entries) + "\n")
    return path


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--comm", "onebit"], "--task sparse-logistic has no --comm: it takes --data, --delay, --filters, --json, "),
        (["--steps", "5", "--amp"], "--task sparse-logistic has no --amp: "),
        (["--limit", "50mbit"], "--task sparse-logistic has no --limit: "),
        (["--l1", "0"], "--l1 must be above 0, got 0"),
        (["--l1", "nan"], "--l1 must be above 0, got nan"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--servers-count", "0"], "--servers-count must be at least 1, got 0"),
        (["--delay", "-1"], "--delay must be at least 0, got -1"),
        (["--filters", "key_cash"], "unknown filter 'key_cash' (known: "),
        (["--filters", "onebit"], "unknown filter 'onebit'"),
        (["--lr", "0"], "--lr must be above 0, got 0"),
        (["--ranks", "9000"], "--ranks 9000, and there are only 8000 examples: each worker needs one"),
        (["--data", "/nowhere/at.all"], "--data /nowhere/at.all: no such file"),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(call: Call, args: list[str], said: str) -> None:
    code, out, err = call(*TASK, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1


def test_its_options_are_refused_where_they_mean_nothing(call: Call) -> None:
    code, out, err = call("train", "--task", "digits", "--l1", "1")
    assert (code, out) == (2, "")
    assert err == "error: --l1 is an option of --task sparse-logistic, and --task digits has none such\n"


def test_torchrun_is_told_that_it_starts_its_own_processes(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "starts its own processes: run it without torchrun" in call(*TASK)[2]


def test_a_bad_line_of_a_file_is_named_before_anything_starts(call: Call, tmp_path: Path) -> None:
    bad = tmp_path / "bad.svm"
    bad.write_text("+1 1:1\n-1 2:1 1:1\n")
    code, out, err = call(*TASK, "--data", str(bad))
    assert (code, out) == (2, "")
    assert err == f"error: {bad} line 2: index 1 comes after 2: indices must ascend, each once\n"


@pytest.mark.full
def test_a_file_is_solved_without_filters_and_with_them_and_both_are_shown(call: Call, file: Path) -> None:
    args = ("--data", str(file), "--ranks", "2", "--servers-count", "1", "--l1", "0.5", "--lr", "2", "--passes", "200")
    code, out, err = call(*TASK, *args, "--json")
    assert code == 0, err
    made = json.loads(out)
    plain, filtered = made["runs"]
    assert (made["data"], made["examples"], made["workers"], made["servers"]) == ("small.svm", 300, 2, 1)
    assert (plain["push"], plain["pull"], plain["kkt"]) == ("none", "none", False)
    assert filtered["push"] == "kkt:l1=0.25+key_cache+fixed_float+lossless"
    assert filtered["pull"] == "lossless"
    for run in made["runs"]:
        assert run["converged"]
        assert run["bytes"] == run["worker_bytes"] + run["server_bytes"]
        assert run["objective"] == pytest.approx(run["course"][-1]["objective"], rel=1e-6)
        assert (run["course"][-1]["sent"], run["course"][-1]["received"]) == (run["worker_bytes"], run["server_bytes"])
    assert filtered["objective"] == pytest.approx(plain["objective"], rel=5e-3)
    assert made["compared"]["ratio"] == pytest.approx(plain["bytes"] / filtered["bytes"])


def dies(source: Generated, at: str, runs: Sequence[SparseSettings]) -> object:
    """A worker that is killed once the run has begun."""
    if os.environ["RANK"] == "3":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return processes.main(source, at, runs)


def test_a_worker_that_is_killed_ends_the_run_and_is_named() -> None:
    source, meeting = Generated(examples=2000, features=3000, seed=1), rendezvous.keep("127.0.0.1")
    runs = [SparseSettings(features=3000, l1=0.05, passes=100_000, tolerance=1e-300)]
    with pytest.raises(RankFailed, match="rank 3 was killed by SIGKILL"):
        run_ranks(dies, 4, (source, f"127.0.0.1:{meeting.port}", runs), timeout=300.0)


@pytest.mark.full
def test_a_generated_problem_takes_five_times_fewer_bytes_with_filters_at_equal_objective() -> None:
    source = Generated(examples=3000, features=20_000)
    plain = SparseSettings(features=20_000)
    runs = (plain, dataclasses.replace(plain, filters=FILTERS, kkt=True))
    made = report.make("t", "generated", source.rows(), runs, processes.in_processes(source, runs))
    assert all(run["converged"] for run in made["runs"])
    assert abs(made["compared"]["objective_difference"]) < 2e-3
    assert made["compared"]["ratio"] > 5
    assert made["compared"]["ratio_to_equal_objective"] > 5


def test_into_a_pipe_the_table_is_whole_and_one_run_is_enough_where_nothing_is_to_be_compared(
    call: Call, file: Path
) -> None:
    code, out, err = call(*TASK, "--data", str(file), "--filters", "none", "--no-kkt", "--passes", "2", "--ranks", "1")
    assert code == 0, err
    assert "task sparse-logistic, small.svm: 300 examples, 200 features" in out
    assert "1 worker and 2 servers over ZeroMQ on loopback" in out
    assert out.count("\n none ") == 1
    assert "not converged, the passes were used up: none: give more --passes" in out
