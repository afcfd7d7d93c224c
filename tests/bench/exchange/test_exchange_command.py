"""``commlib bench exchange``: what a user types, and what a slip gets."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from commlib.bench.exchange.combinations import BASELINE, Pair
from commlib.bench.exchange.command import exchange
from commlib.bench.exchange.runner import measure
from commlib.bench.exchange.trial import TrialSetting
from commlib.bench.exchange.worker import Doing, ExchangeJob
from commlib.bench.launch.processes import RankFailed
from commlib.bench.results.record import read
from commlib.bench.targets import InLab, place

OWN = """
def layers():
    return [("a.weight", (400, 500)), ("b.weight", (300, 512)), ("b.bias", (300,))]
"""
TIME_ENOUGH = "600"  # seconds: no visit is left out, however busy the machine is
LAYERS = [("a.weight", (400, 500)), ("b.weight", (300, 512)), ("b.bias", (300,))]
BYTES = ["accounted_bytes", "socket_bytes", "overhead", "interface_bytes", "dense_bytes", "times_fewer"]
SECONDS = ["compress_s", "wire_s", "decompress_s", "step_s", "spread", "wire_gbit_s", "of_line", "vs_dense"]
COLUMNS = ["model", "parameters", "exchange", "codec", *BYTES, *SECONDS]

app = typer.Typer()
app.command()(exchange)


@pytest.fixture
def own(users_module: Callable[[str, str], Path]) -> Path:
    return users_module("exchange_own", OWN)


def run(*args: str) -> tuple[str, str]:
    done = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout, done.stderr


def test_figures_of_two_ranks_as_json_and_kept(own: Path) -> None:
    command = ["--model", "exchange_own:layers", "--codec", "onebit", "--codec", "powersgd:rank=4", "--rounds", "2"]
    command += ["--seconds", TIME_ENOUGH]
    out, err = run(*command, "--exchange", "gather", "--exchange", "low_rank", "--json", "--save", str(own / "kept"))
    lines = [json.loads(x) for x in out.splitlines()]
    assert all(list(x)[3:] == COLUMNS for x in lines)
    pairs = [f"{x['codec']}@{x['exchange']}" for x in lines]
    assert pairs == ["none@dense", "onebit@gather", "powersgd:rank=4@gather", "powersgd:rank=4@low_rank"]
    assert "left out: onebit cannot go over low_rank" in err
    for x in lines:
        run_facts = x["run"]
        assert (run_facts["ranks"], run_facts["backend"], run_facts["hosts"]) == (2, "gloo", None)
        assert run_facts["line_gbit_s"] > 0
        assert x["parameters"] == sum(math.prod(s) for _, s in LAYERS) == 353_900
        assert x["dense_bytes"] == 4 * 353_900  # 2(P−1)/P = 1 for two ranks
        assert 0 <= x["overhead"] < 0.2
        assert x["times_fewer"] == pytest.approx(x["dense_bytes"] / x["accounted_bytes"], rel=1e-3)
        assert x["step_s"] > 0
        assert x["spread"] is not None
        assert x["interface_bytes"] is None
    assert lines[0]["vs_dense"] == 1.0
    assert lines[0]["times_fewer"] == 1.0
    assert lines[1]["times_fewer"] > 20
    (record,) = read(own / "kept")
    assert record.kind == "exchange"
    assert [list(r) for r in record.rows] == [COLUMNS] * 4


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("backend", ["gloo", "zmq"])
def test_time_that_is_over_is_said_and_the_baseline_is_measured_nevertheless(backend: str) -> None:
    model = ["--model", "exchange_own:layers", "--backend", backend]
    out, err = run(*model, "--codec", "onebit@gather", "--seconds", "0", "--steps", "1")
    assert "left out: 5 of 6 visits, and so all of onebit@gather: --seconds 0 were over" in err
    table = out.splitlines()
    assert any("dense" in x and "none" in x for x in table)
    assert not any("onebit" in x for x in table)
    assert "353,900 parameters" in out
    assert f"2 ranks, {backend}, line" in out


@pytest.mark.full
def test_a_pair_that_cannot_be_attached_is_left_out_and_the_rest_goes_on() -> None:
    pairs = [BASELINE, Pair("onebit", "low_rank"), Pair("onebit", "gather")]
    with place(2, None, None) as where:
        outcome, error = measure(
            where, ExchangeJob(TrialSetting(LAYERS, steps=1), pairs, 2, float(TIME_ENOUGH), "gloo")
        )
    assert error is None
    assert outcome is not None
    assert list(outcome.left_out) == [pairs[1]]
    assert "onebit@low_rank: ValueError: onebit cannot go over low_rank" in outcome.left_out[pairs[1]]
    assert [v.pair for v in outcome.visits] == [pairs[0], pairs[2]] * 2


@pytest.mark.full
@pytest.mark.cold  # a forked rank has the host's network only, and does not die with it
def test_a_host_that_dies_ends_it_but_not_the_figures_until_then(no_lab: str | None) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    with place(None, 2, "1gbit") as where:
        assert isinstance(where, InLab)
        job = ExchangeJob(
            TrialSetting(LAYERS, steps=1), [BASELINE, Pair("onebit", "gather")], 50, float(TIME_ENOUGH), "gloo"
        )

        def power_cut(doing: Doing) -> None:
            if doing.number == 2:
                where.lab.signal(signal.SIGKILL, 1)

        outcome, error = measure(where, job, power_cut)
    assert outcome is not None
    assert [v.pair for v in outcome.visits][:2] == job.pairs
    assert len(outcome.visits) < 10
    assert outcome.line is not None
    assert str(error).startswith("while ")
    assert "was measured: rank 1" in str(error)


def test_an_error_before_the_first_figure_is_the_rank_s_own() -> None:
    with place(2, None, None) as where, pytest.raises(RankFailed, match="two parameters are called 'a'"):
        measure(where, ExchangeJob(TrialSetting([("a", (2,)), ("a", (2,))]), [BASELINE], 1, 10.0, "gloo"))


@pytest.mark.full
@pytest.mark.usefixtures("own")
@pytest.mark.usefixtures("warm_python")
def test_under_torchrun_rank_0_prints() -> None:
    script = Path("go.py")
    script.write_text("import typer\nfrom commlib.bench.exchange.command import exchange\ntyper.run(exchange)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    options = ["--model", "exchange_own:layers", "--codec", "fp16@dense", "--rounds", "1", "--json"]
    options += ["--seconds", TIME_ENOUGH]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([*torchrun, *options], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(x) for x in done.stdout.splitlines()]
    assert [f"{x['codec']}@{x['exchange']}" for x in rows] == ["none@dense", "fp16@dense"]
    assert all(x["accounted_bytes"] <= x["socket_bytes"] < 1.1 * x["accounted_bytes"] for x in rows)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--backend", "glo"], "unknown backend 'glo' .*did you mean 'gloo'"),
        (["--model", "resnet5"], "unknown model 'resnet5'"),
        (["--codec", "onebitt"], "unknown compressor 'onebitt'"),
        (["--exchange", "dens"], "unknown exchange 'dens'"),
        (["--codec", "onebit@dense"], "onebit cannot go over dense"),
        (["--ranks", "1"], "one rank exchanges nothing"),
        (["--ranks", "2", "--rate", "50mbit"], "say how many with --hosts"),
        (["--bucket-cap-mb", "0"], "--bucket-cap-mb must be above 0"),
    ],
)
def test_a_slip_is_named(args: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(*args)


def test_nccl_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="nccl needs a GPU, and PyTorch sees none here; use --backend gloo"):
        run("--backend", "nccl", "--ranks", "3")
