"""Two ranks on each of two emulated hosts: bytes that cross their interfaces, flat and with two levels, and seconds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

VALUES = 3 * 1024 * 1024
RANK = """
import gc, json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import commlib

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
sent = Path("/sys/class/net/eth0/statistics/tx_bytes")

def still():
    "All ranks stand still, and what they sent has left."
    dist.barrier()
    time.sleep(0.3)
    return int(sent.read_text())

models = {}
for name, rule, levels in (("flat", "none", None), ("levels", "none", True), ("onebit", "onebit", True)):
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(3)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1)
    models[name] = (ddp, commlib.attach(ddp, rule, hierarchy=levels))
x = torch.ones(1, 1024)
for turn in range(5):
    for name, (ddp, comm) in models.items():
        before = still()
        dist.barrier()
        start = time.perf_counter()
        ddp(x).sum().backward()
        seconds = time.perf_counter() - start
        crossed = still() - before
        if turn and os.environ["LOCAL_RANK"] == "0":
            said = comm.stats().inter_bytes
            line = dict(host=os.environ["GROUP_RANK"], name=name, crossed=crossed, seconds=seconds, said=said)
            with open(f"{sys.argv[1]}/host{line['host']}", "a") as file:  # printed lines of two hosts would mix
                print(json.dumps(line | dict(about=comm.plan.about)), file=file)
for _, comm in models.values():
    comm.close()
del ddp, models
gc.collect()
dist.destroy_process_group()
"""


def test_two_levels_send_two_thirds_of_a_flat_rings_bytes_between_2x2_ranks_and_are_faster(
    no_lab: str | None, tmp_path: Path
) -> None:
    if no_lab is not None:
        pytest.skip(no_lab)
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, "-m", "commlib", "bench", "lab", "--hosts", "2", "--ranks-per-host", "2"]
    done = subprocess.run(
        [*command, "--rate", "200mbit", "--", sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    lines: list[dict[str, Any]] = [
        json.loads(t) for h in "01" for t in (tmp_path / f"host{h}").read_text().splitlines()
    ]
    assert {(line["host"], line["name"]) for line in lines} == {
        (h, n) for h in "01" for n in ("flat", "levels", "onebit")
    }
    assert {line["about"] for line in lines if line["name"] != "flat"} == {
        "dense inside a node of 2, routes between 2 nodes"  # LOCAL_WORLD_SIZE is set as torchrun would
    }
    crossed, seconds = (
        {n: statistics.median(line[what] for line in lines if line["name"] == n) for n in ("flat", "levels", "onebit")}
        for what in ("crossed", "seconds")
    )
    # Flat, one rank of each host sends to the other in the ring: 2(P − 1)/P of D; with levels 2(N − 1)/N of D.
    # Frames add 5 % at most; the barriers around a step send a few kB.
    gradient = 4 * VALUES
    assert 1.5 * gradient < crossed["flat"] < 1.08 * 1.5 * gradient
    assert 1.0 * gradient < crossed["levels"] < 1.08 * 1.0 * gradient
    assert crossed["onebit"] < crossed["levels"] / 20
    assert seconds["levels"] < 0.9 * seconds["flat"]
    assert seconds["onebit"] < seconds["levels"]  # how much depends on the cores: nothing else is left to wait for
    print(crossed, seconds)
