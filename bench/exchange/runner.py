"""The parent's side: run the job at a place, follow it, and keep what was measured whatever happens then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from commlib.bench.lab import Counters
from commlib.bench.targets import InLab, Target
from commlib.errors import CommlibError
from commlib.messaging.throughput import Stream

from .barrier import Arrived, Gate
from .trial import ExchangeTrial
from .worker import Doing, ExchangeJob, ExchangeOutcome, main


def measure(
    place: Target, job: ExchangeJob, on_doing: Callable[[Doing], None] | None = None
) -> tuple[ExchangeOutcome | None, CommlibError | None]:
    """Run a job.

    Args:
        place: where.
        job: its gate is filled in here.
        on_doing: called before each visit, where this process has started the ranks.

    Returns:
        What was measured (None on a rank of torchrun that is not the first), and the error that ended it early,
        if one did after the first figures.

    Raises:
        CommlibError: an error before there was any figure.
    """
    if not place.launches:
        return place.run(main, (job,)), None
    counters = place.lab.counters if isinstance(place, InLab) else None
    with Gate(place.world_size, counters or _nothing) as gate:
        follower = _Follower(gate, on_doing)
        job = dataclasses.replace(job, setting=dataclasses.replace(job.setting, gate=gate.path))
        try:
            outcome: ExchangeOutcome = place.run(main, (job,), on_message=follower)
        except CommlibError as e:
            if not follower.visits or follower.doing is None:
                raise
            told = ExchangeOutcome(follower.line, follower.visits, {}, follower.doing.total)
            return told, CommlibError(f"while {follower.doing.pair} was measured: {e}")
        return dataclasses.replace(outcome, visits=follower.visits), None


class _Follower:
    """Takes the ranks' messages."""

    def __init__(self, gate: Gate[Sequence[Counters]], on_doing: Callable[[Doing], None] | None) -> None:
        self._gate, self._on_doing = gate, on_doing
        self.doing: Doing | None = None
        self.line: Stream | None = None
        self.visits: list[ExchangeTrial] = []

    def __call__(self, rank: int, message: object) -> None:
        if isinstance(message, Arrived):
            self._gate.arrive()
        elif isinstance(message, Doing):
            self.doing = message
            if self._on_doing is not None:
                self._on_doing(message)
        elif isinstance(message, Stream):
            self.line = message
        elif isinstance(message, ExchangeTrial):  # rank 0 has it only after all have left the gate for the second time
            before, after = self._gate.readings[-2:]
            self.visits.append(dataclasses.replace(message, interfaces=_sum_of_differences(before, after)))


def _sum_of_differences(before: Sequence[Counters], after: Sequence[Counters]) -> Counters | None:
    hosts = [dataclasses.astuple(a - b) for b, a in zip(before, after, strict=True)]
    return Counters(*(sum(column) for column in zip(*hosts, strict=True))) if hosts else None


def _nothing() -> Sequence[Counters]:
    return []
