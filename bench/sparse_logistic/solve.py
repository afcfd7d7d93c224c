"""A worker of the run: gradients of one block after another to a parameter server, and weights back.

Delayed block proximal gradient (Li et al., "Communication Efficient Distributed Machine Learning with the Parameter
Server", NIPS 2014): a block's gradient leaves as soon as it is computed, its weights are waited for only ``delay``
blocks later, and shards move them when they have all workers' gradients of the block. Each block is a parameter of the
server's, with a clock of its own, so nothing is sent of the others meanwhile. (``ParameterServer.step()`` would push
and fetch all of them: whoever has no gradient has to say so, where all workers' make one update.)
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.errors import CommlibError
from commlib.server.job.chunks import Chunk
from commlib.server.worker.session import WorkerSession, WorkerTerms

from .rows import Rows, loss
from .settings import SparseSettings


@dataclasses.dataclass(frozen=True)
class Pass:
    """State after a pass over all blocks, as one worker knows it, or all.

    Args:
        objective: loss of all examples plus λ·Σ|w|.
        nonzero: weights that are not 0.
        sent, received: bytes of this worker's messages, or all workers', since the first gradient.
        seconds: since then.
    """

    objective: float
    nonzero: int
    sent: int
    received: int
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Solved:
    """Result of a run, at one worker or at all.

    Args:
        weights: float32 (features,), as the shards have them.
        passes: one after another.
        converged: whether it ended because the objective changed too little.
    """

    weights: Tensor
    passes: list[Pass]
    converged: bool

    @staticmethod
    def of(workers: Sequence[Solved]) -> Solved:
        """All workers' parts in one, whose bytes are those of all."""
        passes = [
            dataclasses.replace(
                each[0],
                sent=sum(p.sent for p in each),
                received=sum(p.received for p in each),
                seconds=max(p.seconds for p in each),
            )
            for each in zip(*(w.passes for w in workers), strict=True)
        ]
        return dataclasses.replace(workers[0], passes=passes)


class ExampleShard:
    """Examples of one worker by column, and their margins X·w, which follow as weights change.

    Args:
        rows: this worker's examples.
    """

    def __init__(self, rows: Rows) -> None:
        order = rows.keys.argsort(stable=True)
        self._keys, self._row, self._x = rows.keys[order], rows.of()[order], rows.values[order].double()
        self._y = rows.labels.double()
        self._margins = torch.zeros(len(rows), dtype=torch.float64)
        self.weights: Tensor = torch.zeros(rows.features)
        """As this worker knows them, float32 (features,)."""

    def gradient(self, low: int, high: int) -> Tensor:
        """Gradient of these examples' loss for the features from low to high - 1, float32."""
        key, row, x = self._entries(low, high)
        slope = -self._y * torch.sigmoid(-self._y * self._margins)
        return torch.zeros(high - low, dtype=torch.float64).index_add_(0, key, slope[row] * x).float()

    def change(self, low: int, weights: Tensor) -> None:
        """The features from ``low`` on have these weights, (n,), from now on."""
        now = self.weights[low : low + weights.numel()]
        key, row, x = self._entries(low, low + weights.numel())
        self._margins.index_add_(0, row, x * (weights.double() - now.double())[key])
        now.copy_(weights)

    def loss(self) -> float:
        """Loss of these examples, summed, at the weights that this worker knows."""
        return loss(self._y, self._margins)

    def _entries(self, low: int, high: int) -> tuple[Tensor, Tensor, Tensor]:
        """Entries of these columns: (column from ``low``, row, value)."""
        begin, end = torch.searchsorted(self._keys, torch.tensor([low, high])).tolist()
        return self._keys[begin:end] - low, self._row[begin:end], self._x[begin:end]


class SparseWorker:
    """Worker of one run.

    Args:
        session: of the settings' job.
        settings: the same for all workers.
        rows: this worker's examples.
    """

    def __init__(self, session: WorkerSession, settings: SparseSettings, rows: Rows) -> None:
        self._session, self._client, self._settings = session, session.client, settings
        self._shard = ExampleShard(rows)
        *self._blocks, (self._sum,) = settings.chunks()
        self._edges = settings.edges

    def run(self) -> Solved:
        """Work until the end.

        Raises:
            PeerLost: another worker or a shard is missing; it is named.
            CommlibError: a gradient, or the objective, is not finite.
        """
        self._begin()
        settings, passes, converged = self._settings, list[Pass](), False
        began, sent, received = time.monotonic(), self._client.sent, self._client.received
        believed, at = self._objective(), -1  # of the last pass that left nothing out, and which that was
        for number in range(settings.passes):
            self._pass(number)
            objective = self._objective()
            if not math.isfinite(objective) or self._client.refused:
                raise CommlibError(
                    f"the objective is {objective} after pass {number}, and {self._client.refused} gradients of worker "
                    f"{self._session.id} were not finite: give a smaller --lr, or scale the features"
                )
            used = self._client.sent - sent, self._client.received - received
            nonzero = int(self._shard.weights.count_nonzero())
            passes.append(Pass(objective, nonzero, *used, time.monotonic() - began))
            if settings.whole(number):
                converged = abs(believed - objective) <= settings.tolerance * (number - at) * abs(believed)
                believed, at = objective, number
            if converged:
                break
        return Solved(self._final(), passes, converged)

    def _begin(self) -> None:
        """Weights begin at 0."""
        every = [self._sum, *(c for chunks in self._blocks for c in chunks)]
        for chunk in every if self._session.first else ():
            self._client.begin(chunk.key, torch.zeros(chunk.numel, dtype=chunk.dtype))
        for chunk in every:
            self._client.pull(chunk.key)
        for chunk in every:
            self._client.values(chunk.key)

    def _pass(self, number: int) -> None:
        under_way: collections.deque[int] = collections.deque()
        for block in self._settings.order(number):
            while len(under_way) > self._settings.delay:
                self._finish(under_way.popleft())
            gradient = self._shard.gradient(*self._edges[block])
            for chunk in self._blocks[block]:
                self._client.push(chunk.key, gradient[chunk.pieces[0].begin : chunk.pieces[0].end], pull=True)
            under_way.append(block)
        while under_way:
            self._finish(under_way.popleft())

    def _finish(self, block: int) -> None:
        for chunk in self._blocks[block]:
            self._shard.change(self._place(block, chunk), self._client.values(chunk.key)[0])

    def _place(self, block: int, chunk: Chunk) -> int:
        return self._edges[block][0] + chunk.pieces[0].begin

    def _objective(self) -> float:
        """All workers' shares, summed by a shard: so all have the same bits, and stop together."""
        penalty = self._settings.l1 * float(self._shard.weights.double().abs().sum())
        share = self._shard.loss() + penalty / self._settings.workers
        self._client.push(self._sum.key, torch.tensor([share], dtype=torch.float64), pull=True)
        return float(self._client.values(self._sum.key)[0])

    def _final(self) -> Tensor:
        """Weights as the shards have them, bit for bit."""
        weights = torch.empty(self._settings.features)
        for chunk in (c for chunks in self._blocks for c in chunks):
            self._client.pull(chunk.key, exact=True)
        for block, chunks in enumerate(self._blocks):
            for chunk in chunks:
                place = self._place(block, chunk)
                weights[place : place + chunk.numel] = self._client.values(chunk.key)[0]
        return weights


def solve(terms: WorkerTerms, settings: SparseSettings, rows: Rows) -> Solved:
    """Part of one worker, with its examples; it has left the job when this returns.

    Raises:
        PeerLost, CommlibError: as :class:`~commlib.server.worker.session.WorkerSession` and :meth:`SparseWorker.run`.
    """
    session = WorkerSession(settings.job(), terms)
    done = False
    try:
        found = SparseWorker(session, settings, rows).run()
        done = True
        return found
    finally:
        session.close(flush=done)
