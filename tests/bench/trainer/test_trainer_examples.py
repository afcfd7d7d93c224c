"""The scripts in examples/ run as their first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = [pytest.mark.checkout, pytest.mark.usefixtures("warm_python")]


def run(name: str, *args: str) -> str:
    """What an example prints under torchrun with two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *args], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_plain_ddp_script() -> None:
    pytest.importorskip("sklearn")
    found = re.fullmatch(r"test accuracy (.*)%; sent (.*) times fewer bytes than plain DDP\n", run("ddp_digits.py"))
    assert found is not None
    assert float(found[1]) > 85
    assert float(found[2]) > 15


@pytest.mark.full
def test_own_codec() -> None:
    out = run("own_codec.py")
    losses = [float(x) for x in re.findall(r"step +\d+: loss (\S+)\n", out)]
    assert len(losses) == 3
    assert losses[2] < losses[0] / 10
    assert float(re.findall(r"sent (\S+) times fewer", out)[0]) > 3.5


@pytest.mark.alone
def test_a_limited_job_keeps_its_limit_beside_a_neighbour() -> None:
    out = run("shared_link.py", "--limit", "20mbit", "--seconds", "2")
    found = re.findall(r"rank \d: \d+ steps in (\S+) s, job (\S+) Mbit/s, neighbour (\S+) Mbit/s", out)
    assert len(found) == 2
    for seconds, job, neighbour in found:
        assert 0 < float(job) <= 20 + 8e-6 * 125_000 / float(seconds)  # the usual burst
        assert float(neighbour) > 20


@pytest.mark.full
def test_fsdp2_with_gradients_by_onebit_is_at_its_loss_with_a_fraction_of_the_bytes() -> None:
    pytest.importorskip("sklearn")
    lines = run("fsdp_digits.py", "none", "onebit", "int8+int8").splitlines()
    found = {line.split(":")[0].strip(): [float(n) for n in re.findall(r"[\d.]+(?=[ ,;])", line)] for line in lines}
    plain, onebit, int8 = (found[k] for k in ("none", "onebit", "int8+int8"))
    assert onebit[0] < 1.01 * plain[0]
    assert onebit[2] > 4
    assert abs(int8[0] / plain[0] - 1) < 0.01
    assert min(int8[2:4]) > 3.5
