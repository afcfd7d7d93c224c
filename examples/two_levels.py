"""A flat exchange and one of two levels, in turn: bytes that leave rank 0's host in a step, and seconds.

commlib bench lab --hosts 2 --ranks-per-host 2 --rate 200mbit -- python examples/two_levels.py
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=8, help="of 1024 x 1024 values")
parser.add_argument("--bucket-cap-mb", type=float, default=4)
parser.add_argument("--steps", type=int, default=5, help="of each, after two that are not counted")
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
counter = Path("/sys/class/net/eth0/statistics/tx_bytes")


def sent() -> int:
    """By this host, once all ranks stand still."""
    dist.barrier()
    time.sleep(0.3)
    return int(counter.read_text()) if counter.exists() else 0


models = {}
for route, hierarchy in (("none", None), ("none", True), ("onebit", True)):
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(args.layers)))
    ddp = DistributedDataParallel(module, bucket_cap_mb=args.bucket_cap_mb)
    name = f"{'two levels' if hierarchy else 'flat'}, {route}"
    models[name] = (ddp, commlib.attach(ddp, route, hierarchy=hierarchy))

x = torch.ones(1, 1024)
steps: dict[str, list[tuple[float, int]]] = {name: [] for name in models}
for step in range(args.steps + 2):
    for name, (model, _) in models.items():
        before = sent()
        dist.barrier()
        start = time.perf_counter()
        model(x).sum().backward()
        took = time.perf_counter() - start
        if step >= 2:
            steps[name].append((took, sent() - before))

if dist.get_rank() == 0:
    for name, figures in steps.items():
        seconds, crossed = [s for s, _ in figures], [n for _, n in figures]
        line = {
            "exchange": name,
            "plan": models[name][1].plan.about,
            "bytes": statistics.median(crossed),
            "seconds": round(statistics.median(seconds), 3),
            "from": round(min(seconds), 3),
            "to": round(max(seconds), 3),
        }
        print(json.dumps(line), flush=True)
for _model, comm in models.values():
    comm.close()
del ddp, comm, _model, model, models
gc.collect()
dist.destroy_process_group()
