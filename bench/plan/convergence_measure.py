"""Measures the convergence table: rounds to an accuracy, by real training of ranks in one process.

::

    python -m commlib.bench.plan.convergence_measure > bench/plan/convergence.csv

The digits, a network 64 → 64 → 64 → 10, SGD with momentum; every rank has a part of the images, as SparkNet's workers.
Local steps go by the very rules of :mod:`commlib.local_sgd.outer_optimizers`; servers' clocks by those of
:mod:`commlib.server.job.consistency`, in the order in which :mod:`commlib.bench.plan.consistency_simulator` lets reads
and pushes happen. No time is measured: that is for the model (:mod:`commlib.bench.plan.convergence_model`). The same
numbers come out every time.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from commlib.bench.plan.consistency_simulator import simulate
from commlib.bench.plan.convergence_model import ASYNCHRONOUS, LOCAL, SERIAL, RoundsRow, consistency, written
from commlib.bench.trainer.tasks.digits import load, mlp
from commlib.local_sgd import outer_optimizers

WIDTH, BATCH, RATE, MOMENTUM = 64, 32, 0.05, 0.9
RANKS, TAUS, SEEDS = (5, 10), (1, 5, 10, 25, 50), (0, 1, 2)
WAVES = {"ssp": (1,), "wsp": (2, 4)}
ACCURACIES = (0.80, 0.85, 0.90, 0.92, 0.94, 0.95, 0.96)
MOST_STEPS = 500
"""Of a rank."""


class Data:
    """Examples that every rank trains on, and that all are judged by."""

    def __init__(self) -> None:
        task = load(None, WIDTH)
        (self.x, self.y), (self.u, self.v) = task.train, task.test

    def batches(self, ranks: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Step after step, (P, B, 64) pixels and (P, B) classes: each rank by its own part, shuffled anew."""
        drawn = torch.Generator().manual_seed(seed)
        parts = torch.randperm(len(self.x), generator=drawn)[: len(self.x) // ranks * ranks].view(ranks, -1)
        while True:
            order = torch.stack([part[torch.randperm(len(part), generator=drawn)] for part in parts])
            for begin in range(0, order.shape[1] - BATCH + 1, BATCH):
                chosen = order[:, begin : begin + BATCH]
                yield self.x[chosen], self.y[chosen]

    def accuracy(self, values: list[Tensor]) -> float:
        """Accuracy of a model, whose values have a first dimension of 1."""
        return float((logits(values, self.u[None]).argmax(-1)[0] == self.v).float().mean())


def logits(values: list[Tensor], x: Tensor) -> Tensor:
    """(P, B, 10): of P models, each with its own examples (P, B, 64)."""
    for i in range(0, len(values), 2):
        x = torch.baddbmm(values[i + 1].unsqueeze(1), x, values[i].transpose(1, 2))
        x = x.relu() if i + 2 < len(values) else x
    return x


def gradients(values: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Gradients of every model's own mean loss."""
    with torch.enable_grad():
        leaves = [v.detach().requires_grad_() for v in values]
        found = logits(leaves, x)
        loss = functional.cross_entropy(found.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
        return torch.autograd.grad(loss, leaves)


def first_values(seed: int) -> list[Tensor]:
    """First values of one model, with a first dimension of 1."""
    torch.manual_seed(seed)
    return [p.detach()[None].clone() for p in mlp(WIDTH).parameters()]


@dataclasses.dataclass
class Momentum:
    """SGD with momentum, as ``torch.optim.SGD`` has it."""

    kept: list[Tensor]

    @classmethod
    def of(cls, values: list[Tensor]) -> Momentum:
        """Momentum at rest, of zeros."""
        return cls([torch.zeros_like(v) for v in values])

    def step(self, values: list[Tensor], found: tuple[Tensor, ...]) -> None:
        """Take a step in place."""
        for value, kept, gradient in zip(values, self.kept, found, strict=True):
            value.sub_(kept.mul_(MOMENTUM).add_(gradient), alpha=RATE)


@torch.no_grad()
def local_steps(data: Data, rule: outer_optimizers.OuterOptimizer, ranks: int, tau: int, seed: int) -> list[float]:
    """Accuracy of the shared values after every meeting."""
    shared = first_values(seed)
    slots = [{name: torch.zeros_like(v) for name in rule.slots} for v in shared]
    values = [v.repeat(ranks, *[1] * (v.dim() - 1)) for v in shared]
    optimizer, batches, curve = Momentum.of(values), data.batches(ranks, seed), []
    for _ in range(MOST_STEPS // tau):
        for _ in range(tau):
            optimizer.step(values, gradients(values, *next(batches)))
        for value, theta, slot in zip(values, shared, slots, strict=True):
            gone = theta - value
            rule.move(theta, gone.mean(0, keepdim=True), ranks, slot)
            for own, delta in zip(value, gone, strict=True):
                rule.rejoin(own, theta[0], delta, ranks)
        curve.append(data.accuracy(shared))
        if curve[-1] >= ACCURACIES[-1]:
            break
    return curve


@torch.no_grad()
def server_steps(data: Data, algorithm: str, ranks: int, tau: int, seed: int) -> list[float]:
    """Accuracy of a server's values at every clock of the first worker, a message half a step's time on its way."""
    rule, uneven = consistency(algorithm, tau), random.Random(seed)
    run = simulate(rule, ranks, MOST_STEPS, lambda _, __: uneven.uniform(0.75, 1.25), travel=lambda: 0.5)
    center, feed = first_values(seed), Feed(data, ranks, seed)
    server, pushes = Momentum.of(center), Pushes(rule.push_every)
    reads = {w: [r.step for r in run.reads if r.worker == w] + [MOST_STEPS] for w in range(ranks)}
    applied, counts = iter(run.applied), dict.fromkeys(range(ranks), 0)
    curve: list[float] = []
    for read in run.reads:
        while any(counts[w] < n for w, n in read.included.items()):
            unit = next(applied)
            server.step(center, pushes.mean(unit, ranks))
            counts |= {w: stamp + 1 for w, stamp in unit.items()}
        if read.worker == 0 and read.clock > len(curve):
            curve += [data.accuracy(center)] * (read.clock - len(curve))
            if curve[-1] >= ACCURACIES[-1]:
                break
        own = [v.clone() for v in center]
        for step in range(read.step, next(s for s in reads[read.worker] if s > read.step)):
            got = gradients(own, *feed.next(read.worker))
            pushes.add(read.worker, step, got)
            for value, gradient in zip(own, got, strict=True):  # until the next read
                value.sub_(gradient, alpha=RATE)
    return curve


class Feed:
    """Every worker's batches, at its own pace."""

    def __init__(self, data: Data, ranks: int, seed: int) -> None:
        self._source = data.batches(ranks, seed)
        self._held = [deque[tuple[Tensor, Tensor]]() for _ in range(ranks)]

    def next(self, worker: int) -> tuple[Tensor, Tensor]:
        """(1, B, 64) pixels and (1, B) classes."""
        if not self._held[worker]:
            for held, x, y in zip(self._held, *next(self._source), strict=True):
                held.append((x[None], y[None]))
        return self._held[worker].popleft()


class Pushes:
    """Gradients that workers have pushed, and the server has not applied: of so many steps each, added up."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._sums: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, worker: int, step: int, found: tuple[Tensor, ...]) -> None:
        """Add the gradients of one step."""
        key = (worker, step // self._every)
        before = self._sums.get(key)
        self._sums[key] = list(found) if before is None else [a + b for a, b in zip(before, found, strict=True)]

    def mean(self, unit: Mapping[int, int], ranks: int) -> tuple[Tensor, ...]:
        """Mean of the pushes that the server applies as one, worker → stamp: a share of 1/P for each."""
        taken = [self._sums.pop(key) for key in unit.items()]
        return tuple(torch.stack(parts).sum(0) / ranks for parts in zip(*taken, strict=True))


def rounds_to(curves: list[list[float]]) -> Mapping[float, float]:
    """Accuracy → the median over runs of rounds until it was first reached; without those that most did not reach."""
    found = {}
    for accuracy in ACCURACIES:
        first = [next((i + 1 for i, a in enumerate(c) if a >= accuracy), math.inf) for c in curves]
        if math.isfinite(middle := statistics.median(first)):
            found[accuracy] = float(middle)
    return found


def measure() -> Iterator[RoundsRow]:
    """All of the table."""
    data = Data()

    def rows(algorithm: str, ranks: int, tau: int, curves: list[list[float]]) -> Iterator[RoundsRow]:
        for accuracy, count in rounds_to(curves).items():
            yield RoundsRow(algorithm, ranks, tau, accuracy, count)

    alone = outer_optimizers.make("average")
    yield from rows(SERIAL, 1, 1, [local_steps(data, alone, 1, 1, seed) for seed in SEEDS])
    for algorithm, spec in LOCAL.items():
        for ranks in RANKS:
            for tau in TAUS:
                rule = outer_optimizers.make(spec)
                yield from rows(algorithm, ranks, tau, [local_steps(data, rule, ranks, tau, s) for s in SEEDS])
    for algorithm in ASYNCHRONOUS:
        for ranks in RANKS:
            for tau in WAVES[algorithm]:
                curves = [server_steps(data, algorithm, ranks, tau, s) for s in SEEDS]
                yield from rows(algorithm, ranks, tau, curves)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(written(measure()), end="")
