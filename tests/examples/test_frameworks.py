"""The examples with Lightning and Accelerate train under torchrun, and go on from their own checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.checkout, pytest.mark.usefixtures("warm_python")]


def torchrun(script: str, *args: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *args], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize(("script", "more"), [("lightning_digits.py", "6"), ("accelerate_digits.py", "1")])
def test_it_trains_and_resumes(script: str, more: str, tmp_path: Path) -> None:
    first = torchrun(script, "--epochs", "5", "--folder", str(tmp_path))
    again = torchrun(script, "--epochs", more, "--folder", str(tmp_path), "--resume")
    for out, steps in ((first, 115), (again, 138)):
        found = re.search(r"(\d+) steps, test accuracy ([\d.]+)%; sent ([\d.]+) times", out)
        assert found is not None, out
        assert int(found[1]) == steps
        assert float(found[2]) > 80
        assert float(found[3]) > 20
