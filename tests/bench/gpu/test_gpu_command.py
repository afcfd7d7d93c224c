"""The kit for GPUs: what it says, keeps and leaves out; without a GPU it runs on the CPU what can run there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from commlib.bench.gpu import command, stages
from commlib.bench.gpu.stages import STAGES, Skipped, Stage
from commlib.bench.results.table import Row

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--stage", "link"], "did you mean 'links'"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--device", "cuda"], "PyTorch sees no GPU here; use --device simulated"),
        (["--seconds", "1"], "greater than or equal to 10"),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_a_slip_is_named(call: Call, args: list[str], said: str) -> None:
    code, _, err = call("bench", "gpu", *args)
    assert code == 2
    assert said in " ".join(err.split())


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_what_needs_one_is_left_out_with_its_reason(call: Call, tmp_path: Path) -> None:
    some = ["--stage", "kernels", "--stage", "sanitizer"]
    code, out, _ = call("bench", "gpu", "--device", "cpu", *some, "--save", str(tmp_path))
    assert code == 0
    assert "left out: there is no GPU here; these tests need one" in out
    assert "left out: there is no GPU here, whose streams it watches" in out
    assert (tmp_path / "cpu.md").read_text().count("left out") == 2


def fine(device: str, limit_s: float) -> list[Row]:
    """It works."""
    return [{"route": "none", "step_ms": 1.5}]


def fails(device: str, limit_s: float) -> list[Row]:
    """It does not."""
    raise RuntimeError("no such kernel")


def hangs(device: str, limit_s: float) -> list[Row]:
    """It never ends."""
    raise subprocess.TimeoutExpired("pytest", limit_s)


def absent(device: str, limit_s: float) -> list[Row]:
    """It cannot be here."""
    raise Skipped("it needs root")


@pytest.mark.parametrize(
    ("row", "sound"),
    [
        ({"passed": 3, "failed": 0}, True),
        ({"passed": 3, "failed": 1}, False),
        ({"route": "int8", "replicas": "equal", "weights": "others", "status": "ok"}, True),
        ({"route": "int8", "replicas": "differ", "weights": "others", "status": "ok"}, False),
        ({"route": "int8", "replicas": None, "status": "PeerLost: rank 1"}, False),
        ({"route": "int8", "loss_ok": True, "vs_ddp": 0.1, "status": "ok"}, True),
        ({"route": "int8", "loss_ok": False, "vs_ddp": 9.0, "status": "ok"}, False),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_what_is_wrong_makes_the_kit_fail_and_what_is_slow_does_not(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row, sound: bool
) -> None:
    def stage(device: str, limit_s: float) -> list[Row]:
        """Some rows."""
        return [row]

    monkeypatch.setattr(command, "STAGES", [Stage("some", "rows on a GPU", 30, stage)])
    code, _, err = call("bench", "gpu", "--device", "cpu", "--save", str(tmp_path))
    assert code == (0 if sound else 1)
    assert ("not as it should be: some" in err) != sound
    assert "## Rows on a GPU\n" in (tmp_path / "cpu.md").read_text()


@pytest.mark.usefixtures("no_gpu")
def test_a_stage_that_fails_is_said_and_the_next_one_runs(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [Stage(f.__name__, f.__name__, 30, f) for f in (fails, hangs, absent, fine)]
    monkeypatch.setattr(command, "STAGES", made)
    code, out, _ = call("bench", "gpu", "--device", "cpu", "--save", str(tmp_path))
    assert code == 1
    assert "fails: failed: RuntimeError: no such kernel" in out
    assert "hangs: failed: not done in 600 s" in out
    assert "absent: left out: it needs root" in out
    page = (tmp_path / "cpu.md").read_text()
    assert page.index("no such kernel") < page.index("not done in") < page.index("| none | 1.5 |")
    (kept,) = tmp_path.glob("gpu-*.jsonl")
    row = json.loads(kept.read_text())
    assert row["run"]["stage"] == "fine"
    assert (row["route"], row["step_ms"]) == ("none", 1.5)


def test_a_codecs_share_of_a_copy_is_of_the_bytes_it_cannot_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"kernels": "torch", "seconds": 0.5, "gb_per_s": 1.0, "copy_multiple": 2.0}

    def measure(codec: object, numel: int, *args: object, repeat: int) -> list[Row]:
        return [{"op": op, "bits_per_value": 8.0, **shared} for op in ("compress", "decompress_add")]

    monkeypatch.setattr(stages, "measure", measure)
    rows = {(str(r["codec"]), str(r["op"])): r["of_copy"] for r in stages.codecs("cpu", 60)}
    assert (
        rows["int8", "compress"] == (4 + 4 + 4 + 1) / 8 / 2
    )  # reads gradient and residual, writes residual and payload
    assert rows["qsgd", "compress"] == (4 + 1) / 8 / 2  # has no residual
    assert rows["int8", "decompress_add"] == (4 + 4 + 1) / 8 / 2  # reads payload and sum, writes the sum


@pytest.mark.full
@pytest.mark.usefixtures("no_gpu")
def test_ranks_and_codecs_run_on_the_cpu(call: Call, tmp_path: Path) -> None:
    some = ["--stage", "codecs", "--stage", "ranks"]
    code, out, _ = call("bench", "gpu", "--device", "cpu", *some, "--save", str(tmp_path))
    assert code == 0, out
    rows = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    ranks = {row["route"]: row for row in rows if row["run"]["stage"] == "ranks"}
    assert {"ddp", "none", "int8", "onebit"} <= set(ranks)
    assert all(row["replicas"] == "equal" for row in ranks.values())
    assert ranks["none"]["weights"] == "as DDP's"
    assert {row["codec"] for row in rows if row["run"]["stage"] == "codecs"} == set(stages.CODECS)


@pytest.mark.full
@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_ranks_run_by_nccls_rules_where_no_step_waits_and_no_use_is_out_of_order(
    call: Call, tmp_path: Path
) -> None:
    code, out, _ = call("bench", "gpu", "--stage", "ranks", "--save", str(tmp_path))
    assert code == 0, out
    rows = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    assert {"ddp", "none", "factors", "int8", "onebit"} <= {row["route"] for row in rows}
    for row in rows:
        assert (row["status"], row["replicas"], row["host_waits"]) == ("ok", "equal", 0), row
    assert [row["weights"] for row in rows if row["route"] == "none"] == ["as DDP's"]


def test_every_stage_says_in_a_line_what_it_is() -> None:
    assert all((stage.run.__doc__ or "").strip() for stage in STAGES)
    assert sum(stage.limit_s for stage in STAGES) <= 600
