"""Workers and a server under a rule of consistency, with a clock of its own: what is read when, and how long it takes.

The ledger is the one that the server uses. For property tests, and to foretell by how much a rule is faster.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Mapping

from commlib.server.job.consistency import Consistency
from commlib.server.job.version_ledger import VersionLedger


@dataclasses.dataclass(frozen=True)
class Read:
    """Values that a worker got.

    Args:
        worker: who.
        step: that it was for, from 0.
        clock: the worker's.
        included: worker → its pushes that were in the values.
        at: seconds, when they came.
        waited: seconds that the worker did nothing else.
    """

    worker: int
    step: int
    clock: int
    included: Mapping[int, int]
    at: float
    waited: float


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
    """Events of a simulated run.

    Args:
        seconds: until the last worker's last step.
        reads: in the order in which the server answered them.
        applied: (worker → stamp) of what was applied as one, in order.
    """

    seconds: float
    reads: list[Read]
    applied: list[dict[int, int]]


def simulate(
    rule: Consistency,
    workers: int,
    steps: int,
    compute: Callable[[int, int], float],
    *,
    travel: Callable[[], float] = lambda: 0.0,
    evaluate: Callable[[int], float] | None = None,
) -> SimulatedRun:
    """Runs it to its end.

    Args:
        rule: of the server.
        workers: how many.
        steps: of each.
        compute: (worker, step) → seconds of it.
        travel: seconds of one message; those of one worker never overtake each other.
        evaluate: evaluations so far → the result of one more, which the server is told of whenever worker 0 reads.

    Raises:
        AssertionError: all wait for each other.
    """
    return _Simulation(rule, workers, steps, compute, travel, evaluate).run()


class _Simulation:
    def __init__(
        self,
        rule: Consistency,
        workers: int,
        steps: int,
        compute: Callable[[int, int], float],
        travel: Callable[[], float],
        evaluate: Callable[[int], float] | None,
    ) -> None:
        self._rule, self._steps, self._compute, self._travel = rule, steps, compute, travel
        self._evaluate, self._evaluated = evaluate, 0
        self._threshold = rule.threshold()
        self._ledger: VersionLedger[int] = VersionLedger(range(workers), self._threshold)
        self._now, self._order = 0.0, itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sent = [0.0] * workers  # when the last message of each arrives
        self._ends: list[list[float]] = [[] for _ in range(workers)]  # of the steps that have begun
        self._ended = [0] * workers
        self._reading: set[int] = set()
        self._asks: dict[int, tuple[int, int, float]] = {}  # worker → step, clock and time of a read that waits
        self._run = SimulatedRun(0.0, [], [])

    def run(self) -> SimulatedRun:
        for worker in range(len(self._ends)):
            self._enter(worker)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        assert not self._asks, f"{sorted(self._asks)} wait for each other: {dict(self._ledger.included)}"
        return dataclasses.replace(self._run, seconds=self._now)

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _send(self, worker: int, event: Callable[[], None]) -> None:
        self._sent[worker] = max(self._sent[worker], self._now + self._travel())
        self._at(self._sent[worker], event)

    # -- a worker -------------------------------------------------------------------------------

    def _enter(self, worker: int) -> None:
        """Begin a worker's next step, if there is room in the pipeline, and the one before is in."""
        step, ended = len(self._ends[worker]), self._ended[worker]
        if step == self._steps or step - ended == self._rule.depth or worker in self._reading:
            return
        through = step - self._rule.depth + 1  # steps that have ended, for one who waits for room
        if step and (through < 0 or through % self._rule.fetch_every):
            self._work(worker)
        else:
            self._reading.add(worker)
            clock, asked = max(0, through) // self._rule.push_every, self._now
            self._send(worker, lambda: self._ask(worker, step, clock, asked))

    def _work(self, worker: int) -> None:
        ends, step = self._ends[worker], len(self._ends[worker])
        self._reading.discard(worker)
        ends.append(max(ends[-1] if ends else 0.0, self._now + self._compute(worker, step)))
        self._at(ends[-1], lambda: self._end(worker))
        self._enter(worker)

    def _end(self, worker: int) -> None:
        self._ended[worker] += 1
        if self._ended[worker] % self._rule.push_every == 0:
            stamp = self._ended[worker] // self._rule.push_every - 1
            self._send(worker, lambda: self._push(worker, stamp))
        self._enter(worker)

    # -- the server -----------------------------------------------------------------------------

    def _push(self, worker: int, stamp: int) -> None:
        self._run.applied.extend(self._ledger.push(worker, stamp, stamp))
        for waiting in list(self._asks):
            self._answer(waiting)

    def _ask(self, worker: int, step: int, clock: int, asked: float) -> None:
        if worker == 0 and self._evaluate is not None:
            self._threshold.observe(self._evaluate(self._evaluated))
            self._evaluated += 1
        self._asks[worker] = step, clock, asked
        self._answer(worker)

    def _answer(self, worker: int) -> None:
        step, clock, asked = self._asks[worker]
        if not self._ledger.may_read(worker, clock):
            return
        del self._asks[worker]
        came = self._now + self._travel()
        self._run.reads.append(Read(worker, step, clock, dict(self._ledger.included), came, came - asked))
        self._at(came, lambda: self._work(worker))
