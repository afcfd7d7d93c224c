"""Shards that a training brings along: gone when it ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time
import torch
from torch import nn
import commlib

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with commlib.ParameterServer(model, optimizer, "ssp:3", timeout=60) as server:
    print(*(child.pid for child in server._embedded._children), flush=True)
    for step in range(1000):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        server.step()
        time.sleep(0.01)
        if step == 5 and "raise" in sys.argv:
            raise ZeroDivisionError
        if step == 5 and "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 20 and "end" in sys.argv:
            break
"""


def runs(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1), ("kill", -9), ("interrupt", 1)])
def test_no_shard_outlives_a_training_however_that_ends(tmp_path: Path, how: str, code: int) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(program), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    shards = [int(pid) for pid in process.stdout.readline().split()]
    assert len(shards) == 1
    if how == "interrupt":
        time.sleep(0.5)
        os.kill(process.pid, signal.SIGINT)
    begun = time.monotonic()
    _, err = process.communicate(timeout=200)
    assert process.returncode in (code, -signal.SIGINT if how == "interrupt" else code), err
    if how in ("raise", "interrupt"):
        assert ("ZeroDivisionError" if how == "raise" else "KeyboardInterrupt") in err
    while any(map(runs, shards)):
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
