"""Shards that a training brings along: gone when it ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import commlib
from commlib.bench.lab import Lab
from commlib.bench.launch.processes import run_ranks
from tests.support.server_cluster import until

PROGRAM = """
import itertools, os, signal, sys, time
import torch
from torch import nn
import commlib

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with commlib.ParameterServer(model, optimizer, "ssp:3", timeout=120, patience=60) as server:
    print(*(child.pid for child in server._embedded._children), flush=True)
    for step in itertools.count():
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        server.step()
        time.sleep(0.01)
        if step == 5:
            print("trains", flush=True)
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


def chunk_of(folder: str | None) -> tuple[int, list[float]]:
    """Bytes of a chunk that the workers agree on, and the values after a step."""
    model = nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with commlib.ParameterServer(model, optimizer, "bsp", timeout=120, patience=60, snapshots=folder) as server:
        model(torch.ones(2, 500)).sum().backward()
        server.step()
    return server.nbytes, model.bias.tolist()


@pytest.mark.full
@pytest.mark.parametrize(("saves", "kib"), [(False, 128), (True, 2048)])
def test_between_machines_chunks_fit_the_link_unless_they_are_saved(
    lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saves: bool, kib: int
) -> None:
    monkeypatch.setenv("COMMLIB_INSECURE", "1")
    made = lab(2, 20e6)
    port, folder = made.start(), str(tmp_path) if saves else None
    first, second = run_ranks(chunk_of, 2, (folder,), env=lambda r: made.environment(r, port), prefix=made.prefix)
    assert first == second
    assert first[0] == kib << 10


@pytest.mark.full
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("raise", 1), ("kill", -9), ("interrupt", 1)])
def test_no_shard_outlives_a_training_however_that_ends(tmp_path: Path, how: str, code: int) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            shards = [int(pid) for pid in process.stdout.readline().split()]
            if shards and how == "interrupt":
                assert process.stdout.readline() == "trains\n"
                os.kill(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=200)
        finally:
            process.kill()
    assert len(shards) == 1, err
    assert process.returncode in (code, -signal.SIGINT if how == "interrupt" else code), err
    if how in ("raise", "interrupt"):
        assert ("ZeroDivisionError" if how == "raise" else "KeyboardInterrupt") in err
    until(lambda: not any(map(runs, shards)))


@pytest.mark.full
@pytest.mark.usefixtures("warm_python")
def test_under_torchrun_workers_find_each_other_without_a_process_group(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    told = "        os.write(1, b'trained %d.' % server._worker.job.workers)\n        if step == 20"
    program.write_text(PROGRAM.replace("        if step == 20", told))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(program),
        "end",
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("trained 2.") == 2 * 21


def test_several_workers_who_do_not_know_of_each_other_are_told_what_they_need() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="of 3 workers need a process group, or torchrun; else let them"):
        commlib.ParameterServer(model, torch.optim.SGD(model.parameters()), workers=3, rank=1)
