"""Cost of what keeps rows honest: the proof before they are used, and the sample of ``verify=`` afterwards.

    python -m tests.support.verify_cost [RATE] [--steps N] [--width N]

Trains two square layers, by default of 8.4 million parameters in all, on two ranks, each of which may send at RATE, by
default 200 Mbit/s. Prints, on rank 0, what a step of proof takes beside dense ones, and what a verified step takes
beside others, in turn; medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from tests.support import script_ranks

RANKS, BATCH = 2, 32


def _model(width: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)))


def _step(ddp: Any) -> float:
    """Seconds of a step."""
    x = torch.randn(BATCH, ddp.module[0].in_features)
    began = time.perf_counter()
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    return time.perf_counter() - began


def proof(rate: str, width: int) -> str:
    """What the manager's step of proof takes."""
    ddp = _model(width)
    comm = commlib.attach(ddp, limit=rate)
    times: dict[str, list[float]] = {}
    for _ in range(100):
        phase = comm._manager.decision.phase if comm._manager is not None else ""
        times.setdefault(phase, []).append(_step(ddp))
        if comm.settled:
            break
    comm.close()
    if "proof" not in times:
        return "no layer went by rows"
    dense, proved = statistics.median(times["watch"]), sum(times["proof"])
    count = len(times["proof"])
    return (
        f"{count} step(s) of proof: {proved:.3f} s, {proved / dense - count:.2f} dense steps more than as many of them"
    )


def sample(rate: str, width: int, steps: int, rule: str) -> str:
    """What a verified step takes."""
    models, comms = [_model(width), _model(width)], []
    for ddp, verify in zip(models, (0, 1), strict=True):
        comms.append(commlib.attach(ddp, rule, limit=rate, verify=verify))
    times = [[_step(ddp) for ddp in models] for _ in range(steps)][2:]
    for comm in comms:
        comm.close()
    plain, verified = (statistics.median(column) for column in zip(*times, strict=True))
    share = (verified / plain - 1) / 10_000
    return f"{rule}: a step {plain:.3f} s, verified {verified:.3f} s; one in 10,000 of them adds {share:.4%}"


def _script(rank: int, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    said = [proof(given.rate, given.width)]
    said += [sample(given.rate, given.width, given.steps, rule) for rule in ("factors", "owners", "onebit")]
    if rank == 0:
        print("\n".join(said), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Forks the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rate", nargs="?", default="200mbit", help="what each rank may send")
    parser.add_argument("--steps", type=int, default=20, help="of each model; the first two are not counted")
    parser.add_argument("--width", type=int, default=2048, help="of the layers")
    given = parser.parse_args()
    codes = script_ranks.run(RANKS, lambda rank: _script(rank, given))
    if codes is not None:
        sys.exit(max(codes))


if __name__ == "__main__":
    main()
