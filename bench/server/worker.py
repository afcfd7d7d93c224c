"""Body of one rank of ``commlib bench server``, and its network, which computes by sleeping."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib.bench.link.worker import measure_line

from .ring_throughput import RingBenchmark, busy_share, measure_ring, ticks


class FlatLayer(nn.Module):
    """Values that get a gradient of ones.

    Args:
        numel: of its parameter, float32.
        forward_s, backward_s: seconds that it computes.
    """

    def __init__(self, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self._gradient = torch.ones(numel)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        made: Any = _Sleeping.apply(x, self.weight, self._gradient, self.backward_s)  # type: ignore[no-untyped-call]
        return cast(Tensor, made)


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], ctx.gradient, None, None


def network(layers: int, nbytes: int, forward_s: float, backward_s: float) -> nn.Sequential:
    """So many layers alike, with so many bytes and seconds in all."""
    each = nbytes // 4 // layers
    return nn.Sequential(*(FlatLayer(each, forward_s / layers, backward_s / layers) for _ in range(layers)))


_WARM = 2


@dataclasses.dataclass(frozen=True)
class ServerBenchmarkJob:
    """Job of the ranks: model, rule and steps that are measured.

    Args:
        rule: of consistency.
        layers, nbytes: of the model.
        forward_s, backward_s: seconds that it computes, in the second part.
        steps: timed in each visit.
        rounds: visits to each way, in turn.
        chunk: bytes of a chunk, at most; None: what fits the link.
    """

    rule: str
    layers: int
    nbytes: int
    forward_s: float
    backward_s: float
    steps: int
    rounds: int
    chunk: int | None


@dataclasses.dataclass(frozen=True)
class ServerTrial:
    """Times of one visit to one way.

    Args:
        step_s: seconds a step of the slowest rank, the median of the visit's.
        cores: busy share of this rank's machine's cores meanwhile; None where that is not to be had.
    """

    step_s: float
    cores: float | None


@dataclasses.dataclass(frozen=True)
class ServerFigures:
    """Figures of the benchmark; the ways' by visit.

    Args:
        line_gbit_s: a raw TCP stream's from one rank to one other, all others quiet; None for one rank.
        ring: raw TCP streams of all ranks at once; None for one rank.
        chunk: bytes of a chunk, at most.
        bare: pushes and pulls alone, nothing computed.
        first_first: as by_layer, and what the next forward pass needs first is sent first.
        by_layer: with a network that computes, each layer waiting for its own values.
        joined: the same, all waiting for all before the first layer.
    """

    line_gbit_s: float | None
    ring: RingBenchmark | None
    chunk: int
    bare: list[ServerTrial]
    first_first: list[ServerTrial]
    by_layer: list[ServerTrial]
    joined: list[ServerTrial]


def main(job: ServerBenchmarkJob) -> ServerFigures:
    """Measures; every rank gets the same figures, but for the cores of its own machine. Collective."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    line = measure_line(1.0)
    ring = measure_ring(2.0)
    bare = _Way(job, 0.0, 0.0)
    found = ServerFigures(line.gbit_s if line else None, ring, bare.chunk, [], [], [], [])
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

    def __init__(self, job: ServerBenchmarkJob, forward_s: float, backward_s: float, *, priority: bool = False) -> None:
        self._job, self._model = job, network(job.layers, job.nbytes, forward_s, backward_s)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        self._server = commlib.ParameterServer(
            self._model, self._optimizer, job.rule, nbytes=job.chunk, priority=priority
        )

        self.chunk = self._server.nbytes

    def visit(self, *, joined: bool) -> ServerTrial:
        """Some steps for warmth, then those that are timed."""
        for _ in range(_WARM):
            self._step(joined)
        before = ticks()
        taken = [self._step(joined) for _ in range(self._job.steps)]
        cores = busy_share(before, ticks())
        self._server.sync()
        slowest = torch.tensor(statistics.median(taken))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return ServerTrial(float(slowest), cores)

    def _step(self, joined: bool) -> float:
        begun = time.perf_counter()
        if joined:
            self._server.wait()
        self._model(torch.zeros(1, requires_grad=True)).sum().backward()
        self._server.step()
        return time.perf_counter() - begun

    def close(self) -> None:
        self._server.close()
        dist.barrier()
