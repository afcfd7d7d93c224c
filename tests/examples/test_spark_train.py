"""SparkNet's loop and compressed DDP train inside a real Spark, and learn what one process learns (``make spark``)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "spark_train.py"
MISSING = [name for name in ("pyspark", "pandas", "pyarrow", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.checkout,
    pytest.mark.timeout(900),  # two jobs of Spark, each with processes in processes
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (make spark installs them)"),
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java: apt install openjdk-17-jre-headless"),
]


def test_both_loops_learn_what_one_process_learns_and_replicas_are_equal(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--folder", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(list((tmp_path / "train").glob("part-*.parquet"))) == 2
    alone, sparknet, ddp = found["one process"], found["SparkNet, 25"], found["DDP, onebit"]
    assert alone["accuracy"] > 0.93
    for run in (sparknet, ddp):
        assert run["equal"]
        assert run["accuracy"] > alone["accuracy"] - 0.03
    # 12 meetings with 19,210 values of 4 bytes; and 300 steps with a bit each, some means, and a bias as it is.
    assert 12 * 4 * 19_210 <= sparknet["bytes"] < 1.1 * 12 * 4 * 19_210
    assert 300 * 19_210 / 8 < ddp["bytes"] < 300 * 4 * 19_210 / 10
