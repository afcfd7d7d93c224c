"""Schedule of trials: rounds, what came of them, and who dropped out. Pure; every rank keeps a copy.

A visit is one contender training for a few steps. In every round each contender is visited once, forwards in
one round and backwards in the next, so that a machine that gets slower or faster favours none of them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from .correctness import Evidence

LEAST, MOST = 5, 15  # rounds, where the time decides
_MORE = 3  # times as many steps, at most, has a route that is faster than the baseline
_PATIENCE = 4  # times the baseline's visit; compression that takes longer has lost anyway
_TRIALS = 60  # steps of the baseline's length, in which a bandwidth manager may try what it has planned


@dataclasses.dataclass(frozen=True)
class TrainingTrial:
    """Turn of one configuration."""

    round: int
    name: str


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    """Outcome of a trial; the same on every rank.

    Args:
        visit: which.
        seconds: it took in all, on the slowest rank.
        steps_s: seconds of each timed step, on the slowest rank.
        sent_bytes: a step, TCP payload of rank 0; None if the system does not count.
        evidence: of whether it learned; None with an error.
        error: why it came to nothing, or None.
        predicted_s: a step, by the bandwidth manager; None without one.
        levels: what became of a hierarchy; None if none was asked for.
    """

    visit: TrainingTrial
    seconds: float
    steps_s: tuple[float, ...] = ()
    sent_bytes: float | None = None
    evidence: Evidence | None = None
    error: str | None = None
    predicted_s: float | None = None
    levels: str | None = None


@dataclasses.dataclass
class Schedule:
    """The state of a race. Deterministic: fed with the same outcomes, copies stay equal.

    Args:
        names: the contenders, the baseline first.
        rounds: how many; None: as many as ``budget_s`` allows, at least :data:`LEAST`.
        steps: timed ones in a visit; routes faster than the baseline get more from their second visit on.
        budget_s: seconds that the visits may take, judged by the first round.
        first_limit_s: how long the baseline's first visit may take.
        least_limit_s: how long any visit may take, however fast the baseline is.
        managed: those of the names that have a bandwidth manager, and settle before they are timed.
        outcomes: what came of the visits so far.
        dropped: who has no further turn, and why.
        lost_s: seconds that visits took whose ranks had to be ended.
    """

    names: Sequence[str]
    rounds: int | None
    steps: int
    budget_s: float
    first_limit_s: float
    least_limit_s: float
    managed: frozenset[str] = frozenset()
    outcomes: list[TrialOutcome] = dataclasses.field(default_factory=list)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    lost_s: float = 0.0

    @property
    def baseline(self) -> str:
        """Name of the configuration that the others are compared with."""
        return self.names[0]

    def next(self) -> TrainingTrial | None:
        """Next trial; None at the end, which comes at once if the baseline failed."""
        if self.baseline in self.dropped:
            return None
        done = {o.visit for o in self.outcomes}
        for number in range(self.planned_rounds()):
            order = self.names if number % 2 == 0 else self.names[::-1]
            for name in order:
                visit = TrainingTrial(number, name)
                if name not in self.dropped and visit not in done:
                    return visit
        return None

    def record(self, outcome: TrialOutcome) -> None:
        """Take in what came of a visit; a contender that failed has no further turn."""
        self.outcomes.append(outcome)
        if outcome.error is not None:
            self.dropped[outcome.visit.name] = outcome.error

    def lose(self, visit: TrainingTrial, why: str, seconds: float) -> None:
        """A visit whose ranks had to be ended, after so many seconds."""
        self.dropped[visit.name] = why
        self.lost_s += seconds

    def limit_s(self, name: str) -> float:
        """How long a contender's next visit may take before it counts as hung."""
        known = [o.seconds for o in self.of(self.baseline)]
        if not known:
            return self.first_limit_s
        trials = _TRIALS * (self._step_s(self.baseline) or 0.0) if name in self.managed else 0.0
        return max(self.least_limit_s, _PATIENCE * max(known)) + trials

    def steps_of(self, name: str) -> int:
        """Timed steps in a contender's next visit: so many that it runs about as long as the baseline's.

        A short visit would see one moment of a machine that others use too.
        """
        own, base = self._step_s(name), self._step_s(self.baseline)
        if own is None or base is None:
            return self.steps
        return max(self.steps, min(_MORE * self.steps, int(self.steps * base / own)))

    def _step_s(self, name: str) -> float | None:
        first = self.of(name)[:1]
        return statistics.median(first[0].steps_s) if first else None

    def _cost_s(self, first: TrialOutcome) -> float:
        """Seconds that a further visit takes, from the first."""
        more = self.steps_of(first.visit.name) - len(first.steps_s)
        return first.seconds + max(0, more) * (self._step_s(first.visit.name) or 0.0)

    def planned_rounds(self) -> int:
        """How many rounds there will be, as far as is known."""
        if self.rounds is not None:
            return self.rounds
        first = [o for o in self.outcomes if o.visit.round == 0]
        seen = {o.visit.name for o in first} | set(self.dropped)
        if not seen.issuperset(self.names):
            return LEAST
        # What went wrong in it costs the later rounds nothing.
        cost = sum(self._cost_s(o) for o in first if o.visit.name not in self.dropped)
        left = self.budget_s - self.lost_s - sum(o.seconds for o in first)
        return max(LEAST, min(MOST, 1 + int(left / cost))) if cost > 0 else LEAST

    def visits_left(self) -> int:
        """How many visits are still to come, as far as is known."""
        racing = [n for n in self.names if n not in self.dropped]
        done = sum(o.visit.name in racing for o in self.outcomes)
        return max(0, self.planned_rounds() * len(racing) - done)

    def of(self, name: str) -> list[TrialOutcome]:
        """The visits of a contender that came to something, by round."""
        mine = [o for o in self.outcomes if o.visit.name == name and o.error is None]
        return sorted(mine, key=lambda o: o.visit.round)
