"""The race seen from outside: start the ranks, follow them, and start them anew without whoever made them hang."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable

from commlib.bench.launch.processes import RankFailed
from commlib.bench.targets import Target
from commlib.errors import CommlibError
from commlib.messaging.throughput import Stream

from .schedule import Schedule, TrainingTrial, TrialOutcome
from .trial import TrainingJob, Trouble
from .worker import Began, main

_NEARLY = 0.9  # of its limit: a visit that ended so late was ended by the watchdog


class BaselineFailed(CommlibError):
    """Plain DDP (or FSDP2) came to nothing, so there is nothing to compare with."""


class Watcher:
    """The parent's copy of the schedule, and the visit under way; called with the ranks' messages.

    Args:
        schedule: kept up to date.
        show: called with (visit or None, schedule) whenever something has changed.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        schedule: Schedule,
        show: Callable[[TrainingTrial | None, Schedule], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.schedule = schedule
        self.line: Stream | None = None
        self._show, self._clock = show, clock
        self._visit: TrainingTrial | None = None
        self._began = self._limit_s = 0.0
        self._trouble: dict[int, str] = {}

    def __call__(self, rank: int, message: object) -> None:
        """A message of a rank."""
        if isinstance(message, Stream):
            self.line = message
        elif isinstance(message, Began):
            self._visit, self._limit_s, self._began = message.visit, message.limit_s, self._clock()
            self._trouble = {}
            self._show(message.visit, self.schedule)
        elif isinstance(message, TrialOutcome):
            self.schedule.record(message)
            self._visit = None
            self._show(None, self.schedule)
        elif isinstance(message, Trouble) and message.visit == self._visit:
            self._trouble[rank] = message.text

    def ended(self, error: RankFailed) -> bool:
        """The ranks have ended before their time; whether the schedule can go on without who was running."""
        visit, self._visit = self._visit, None
        if visit is None:
            return False
        seconds = self._clock() - self._began
        why = self._why(error, seconds)
        self.schedule.lose(visit, why, seconds)
        print(f"{visit.name} is left out: {why}; all ranks were ended", file=sys.stderr)
        return True

    def _why(self, error: RankFailed, seconds: float) -> str:
        if "was killed by" in str(error):
            return str(error)
        if self._trouble:
            rank, text = next(iter(self._trouble.items()))
            return f"rank {rank}: {text}; the others hung"
        if seconds >= _NEARLY * self._limit_s:
            return f"hung, no end after {self._limit_s:.0f} s"
        return str(error)


def race(
    place: Target, job: TrainingJob, schedule: Schedule, show: Callable[[TrainingTrial | None, Schedule], None]
) -> tuple[Schedule, Stream | None] | None:
    """Run a schedule to its end; None on all ranks of torchrun but the first.

    Raises:
        BaselineFailed: the baseline failed or hung.
        RankFailed: the ranks ended outside of any visit.
        KeyboardInterrupt, Terminated: as ``place.run``.
    """
    watcher = Watcher(dataclasses.replace(schedule), show)
    while True:
        try:
            result = place.run(
                main,
                (job, watcher.schedule, watcher.line is None, not place.launches),
                on_message=watcher,
            )
        except RankFailed as e:
            if not watcher.ended(e):
                raise
            result = (watcher.schedule, watcher.line)
            if watcher.schedule.next() is not None:
                continue
        break
    if result is None:
        return None
    done: Schedule = result[0]
    if done.baseline in done.dropped:
        raise BaselineFailed(
            f"{job.model}: plain {done.baseline.upper()} came to nothing ({done.dropped[done.baseline]})"
        )
    return done, watcher.line or result[1]
