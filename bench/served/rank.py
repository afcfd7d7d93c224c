"""What one rank of the benchmark does."""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch
import torch.distributed as dist

import commlib
from commlib.bench.link.stream import measure_line

from .model import network

_WARM = 2


@dataclasses.dataclass(frozen=True)
class Job:
    """What is measured.

    Args:
        rule: of consistency.
        layers, nbytes: of the model.
        forward_s, backward_s: seconds that it computes, in the second part.
        steps: timed in each visit.
        rounds: visits to each way, in turn.
    """

    rule: str
    layers: int
    nbytes: int
    forward_s: float
    backward_s: float
    steps: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class Figures:
    """Seconds a step, of each visit, of the slowest rank.

    Args:
        line_gbit_s: a raw TCP stream's.
        bare: pushes and pulls alone, nothing computed.
        first_first: as by_layer, and what the next forward pass needs first is sent first.
        by_layer: with a network that computes, each layer waiting for its own values.
        joined: the same, all waiting for all before the first layer.
    """

    line_gbit_s: float
    bare: list[float]
    first_first: list[float]
    by_layer: list[float]
    joined: list[float]


def main(job: Job) -> Figures:
    """Measures; every rank gets the same figures. Collective."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    line = measure_line(1.0)
    bare = _Way(job, 0.0, 0.0)
    found = Figures(line.gbit_s if line else float("nan"), [], [], [], [])
    for _ in range(job.rounds):
        found.bare.append(bare.visit(joined=False))
    bare.close()
    computing, urgent = (_Way(job, job.forward_s, job.backward_s, priority=p) for p in (False, True))
    for _ in range(job.rounds):
        found.by_layer.append(computing.visit(joined=False))
        found.first_first.append(urgent.visit(joined=False))
        found.joined.append(computing.visit(joined=True))
    computing.close()
    urgent.close()
    dist.destroy_process_group()
    return found


class _Way:
    """A model with its servers."""

    def __init__(self, job: Job, forward_s: float, backward_s: float, *, priority: bool = False) -> None:
        self._job, self._model = job, network(job.layers, job.nbytes, forward_s, backward_s)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._server = commlib.ParameterServer(self._model, self._optimizer, job.rule, priority=priority)

    def visit(self, *, joined: bool) -> float:
        """Seconds a step of the slowest rank: the median of a visit's steps."""
        taken = []
        for _ in range(_WARM + self._job.steps):
            begun = time.perf_counter()
            if joined:
                self._server.wait()
            self._model(torch.zeros(1, requires_grad=True)).sum().backward()
            self._server.step()
            taken.append(time.perf_counter() - begun)
        self._server.sync()
        slowest = torch.tensor(statistics.median(taken[_WARM:]))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest)

    def close(self) -> None:
        self._server.close()
        dist.barrier()
