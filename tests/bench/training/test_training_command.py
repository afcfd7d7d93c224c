"""``commlib bench train`` as a user calls it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commlib.bench.results.record import read
from commlib.bench.training import command, fsdp
from commlib.bench.training.configurations import COMMLIB
from commlib.bench.training.schedule import Schedule

TRAIN = [sys.executable, "-m", "commlib", "bench", "train"]
DEADLINE_S = 120.0  # against hanging


def train(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRAIN, *args], capture_output=True, text=True, timeout=300, env={**os.environ, **env})


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model", "gtp"], "unknown model 'gtp' (known: all, conv, fc, gpt, gpt-small"),
        (["--compute", "fake"], "--compute is real or simulated:MS"),
        (["--only", "torch-fp61"], "did you mean 'torch-fp16'"),
        (["--comm", "onebitt"], "unknown compressor 'onebitt'"),
        (["--backend", "glo"], "unknown backend 'glo'"),
        (["--ranks", "1"], "it takes --ranks 2"),
        (["--limit", "fast"], "--limit: a rate is a number and kbit, mbit or gbit, as 200mbit; got 'fast'"),
        (["--limit", "50mbit", "--backend", "nccl"], "use --backend gloo, or leave --limit out"),
        (["--hierarchy", "--ranks-per-host", "2"], "say how many with --hosts"),
        (["--bucket-cap-mb", "0"], "--bucket-cap-mb must be above 0"),
        (["--rate", "200mbit"], "--hosts"),
        (["--plot", "steps.gif"], "--plot writes .png, .svg, .pdf"),
        (["--plot", "steps.png", "--model", "gpt", "--model", "fc"], "--plot draws one model, and these are fc, gpt"),
    ],
)
def test_a_mistake_gets_one_line(call: Callable[..., tuple[int, str, str]], args: list[str], said: str) -> None:
    code, out, err = call("bench", "train", *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_record_is_drawn_as_the_report_draws_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (record,) = read(Path(__file__).parents[1] / "report" / "samples" / "train-200mbit.jsonl")
    one = dataclasses.replace(record, rows=[r for r in record.rows if r["model"] == record.rows[0]["model"]])
    command._draw(one, tmp_path / "steps.svg")
    drawn = (tmp_path / "steps.svg").read_text()
    assert len(drawn) > 5000
    assert drawn.rstrip().endswith("</svg>")


@pytest.mark.full
def test_quick_prints_a_table_and_what_it_means(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(command, "_LEAST_S", 200.0)  # for a visit, however busy the machine is
    code, out, err = call("bench", "train", "--quick", "--save", str(tmp_path))
    assert code == 0, err
    for word in ("gpt-small", "664,704 parameters", "2 ranks", "Gbit/s", "torch-fp16", "onebit", "vs ddp", "plain DDP"):
        assert word in out
    (record,) = read(tmp_path)
    assert record.kind == "train"
    assert [r["route"] for r in record.rows] == ["ddp", "torch-fp16", "auto", "int8", "onebit", "powersgd:rank=4"]
    assert all(r["status"] == "ok" and r["loss_ok"] for r in record.rows)


@pytest.mark.alone
def test_on_slow_hosts_compression_wins_and_json_says_so(lab: Callable[..., Any]) -> None:
    lab(2)  # skips where there can be none
    args = ["--quick", "--hosts", "2", "--rate", "20mbit", "--only", "int8", "--only", "onebit", "--rounds", "2"]
    done = train(*args, "--steps", "2", "--json", "--compute", "simulated:20")
    assert done.returncode == 0, done.stderr
    rows = {r["route"]: r for r in map(json.loads, done.stdout.splitlines())}
    assert set(rows) == {"ddp", "int8", "onebit"}
    run = rows["ddp"]["run"]
    assert (run["ranks"], run["hosts"], run["rate"], run["compute"]) == (2, 2, "20mbit", "simulated:20")
    assert 0.005 < run["line_gbit_s"] < 0.022  # on cores lent to others a line is slower, never faster
    assert rows["ddp"]["steps"] == 4
    # 2.7 MB at 20 Mbit/s are 1.1 s a step; one bit a value is 30 times less.
    assert rows["ddp"]["step_s"] > 0.9
    assert rows["onebit"]["vs_ddp"] > 2
    assert all(r["loss_ok"] for r in rows.values())
    assert "onebit" in done.stderr  # the sentences, away from the JSON


@dataclasses.dataclass
class Hasty(Schedule):
    """A deadlock costs seconds, and whoever comes to an end has minutes for it, however busy the machine is."""

    def limit_s(self, name: str) -> float:
        return 15.0 if name == "torch-powersgd" else 200.0


@pytest.mark.full
def test_a_hook_of_pytorch_that_deadlocks_over_gloo_stops_nobody(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "Schedule", Hasty)
    args = ["--model", "gpt-small", "--ranks", "4", "--bucket-cap-mb", "0.3", "--rounds", "1", "--steps", "2"]
    args += ["--only", "torch-powersgd", "--only", "torch-bf16", "--only", "onebit", "--json"]
    code, out, err = call("bench", "train", *args)
    assert code == 0, err
    rows = {r["route"]: r for r in map(json.loads, out.splitlines())}
    assert rows["ddp"]["status"] == "ok"
    assert rows["onebit"]["status"] == "ok"
    assert rows["onebit"]["steps"] == 2
    assert rows["torch-bf16"]["status"].startswith("TypeError: BF16")  # it wants NCCL
    lost = rows["torch-powersgd"]
    assert lost["steps"] == 2 or lost["status"] != "ok"


@pytest.mark.full
@pytest.mark.usefixtures("warm_python")
def test_under_torchrun_rank_0_prints() -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", *TRAIN[2:]]
    args = ["--quick", "--only", "onebit", "--steps", "1", "--json"]
    env = {**os.environ, "COMMLIB_KERNELS": "reference"}  # nothing to compile in a visit, which has 16 s
    done = subprocess.run([sys.executable, *torchrun, *args], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
    assert [r["route"] for r in lines] == ["ddp", "onebit"]


@pytest.mark.full
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_when_told_to_stop_it_leaves_nobody(signum: int, code: int) -> None:
    process = subprocess.Popen([*TRAIN, "--model", "gpt-small", "--rounds", "15"], stderr=subprocess.PIPE, text=True)
    try:
        ranks = _ranks_of(process)
        process.send_signal(signum)
        assert process.wait(DEADLINE_S) == code
        until = time.monotonic() + DEADLINE_S
        while (alive := [p for p in ranks if _alive(p)]) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive
    finally:
        process.kill()
        process.communicate()


def _ranks_of(process: subprocess.Popen[str]) -> list[int]:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        found = [p for t in Path(f"/proc/{process.pid}/task").glob("*/children") for p in t.read_text().split()]
        if len(found) == 2:
            return [int(p) for p in found]
        assert process.poll() is None
        time.sleep(0.05)
    raise AssertionError("no ranks")


def _alive(pid: int) -> bool:
    try:
        return re.search(r"^State:\s+[^Z]", Path(f"/proc/{pid}/status").read_text(), re.M) is not None
    except OSError:
        return False


@pytest.mark.full
def test_the_help_names_every_default_route() -> None:
    shown = train("--help", COLUMNS="160", TERM="dumb")
    assert shown.returncode == 0
    text = " ".join(shown.stdout.replace("│", " ").split())
    for name in (*COMMLIB, *fsdp.COMMLIB, "gpt-small", "simulated:MS", "vs_ddp", "vs_fsdp2"):
        assert name in text
