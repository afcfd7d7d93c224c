"""On two emulated hosts: with keys ranks find each other, without they are told what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commlib.messaging import keys

PROGRAM = """
import datetime, torch, torch.distributed as dist
import commlib

dist.init_process_group("zmq", timeout=datetime.timedelta(seconds=120))
x = torch.full((300_000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert x.eq(3).all()
print("summed")
dist.destroy_process_group()
"""


def run(tmp_path: Path, **environment: str) -> tuple[int, str]:
    """The exit status, and what both ranks said."""
    script = tmp_path / "job.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "commlib", "bench", "lab", "--hosts", "2", "--", sys.executable, str(script)],
        env={**os.environ, "COMMLIB_KEYS": str(tmp_path / "keys"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout


@pytest.mark.full
@pytest.mark.usefixtures("warm_python")
def test_keys_are_asked_for_found_and_done_without_only_when_told_to(no_lab: str | None, tmp_path: Path) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    status, said = run(tmp_path)
    assert status != 0
    assert "AuthenticationError: no key 'default'" in said
    assert "'commlib keys new default' makes one" in said

    status, said = run(tmp_path, COMMLIB_INSECURE="1")
    assert (status, said.count("summed")) == (0, 2), said
    assert "listens at 10.0.0.1 with insecure=True: anyone there can read and send frames" in said

    keys.create("default", tmp_path / "keys")
    for any_source in "0", "1":
        status, said = run(tmp_path, COMMLIB_ANY_SOURCE=any_source)
        assert (status, said.count("summed")) == (0, 2), said
        assert "insecure" not in said
