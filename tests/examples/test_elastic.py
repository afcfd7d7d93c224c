"""A training with a killed worker ends as one without."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commlib.bench.launch.processes import run_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic.py"
pytestmark = pytest.mark.checkout


def script(*args: str) -> None:
    """In a process of its own."""
    sys.argv = [str(SCRIPT), *args]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def same(a: Any, b: Any) -> bool:
    """To the last bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.full
def test_a_killed_worker_changes_nothing_and_other_ranks_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMLIB_KERNELS", "reference")  # not a matter of codecs: to compile them takes two seconds
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    # In this step rank 0 writes its part of a checkpoint, and rank 1 does not.
    args = [str(SCRIPT), str(killed), "--steps", "30", "--every", "10", "--kill", "1@20"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", *args], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    assert re.findall(r"attempt (\d): begins after step (\d+)", done.stdout) == [("0", "0"), ("1", "10")]

    run_ranks(script, 2, (str(whole), "--steps", "30", "--every", "10"), timeout=300)
    for folder in (killed, whole):
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-000030-of-2"]
    for rank in range(2):
        one, other = (torch.load(f / "step-000030-of-2" / f"rank-{rank}.pt") for f in (killed, whole))
        assert one["comm"]["step"] == 30
        assert same(one, other)

    run_ranks(script, 1, (str(whole), "--steps", "35"), timeout=300)
    alone = torch.load(whole / "step-000035-of-1" / "rank-0.pt")
    assert alone["comm"]["step"] == 35
    assert list(alone["comm"]["ranks"]) == ["0"]


@pytest.mark.full
def test_attempts_that_would_share_a_store_are_told_before_they_begin(tmp_path: Path) -> None:
    env = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun" in done.stderr
