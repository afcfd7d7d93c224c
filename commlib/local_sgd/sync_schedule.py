"""When ranks meet: after every τ steps, a number that is given, or follows from what steps and meetings take.

How many local steps between two meetings, and what they gain: SparkNet's model (ICLR 2016, section 2.3). Pure.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from commlib.runtime.plugins import build, split


def steps_for(step_s: float, meeting_s: float, share: float) -> int:
    """τ: the fewest steps of which a meeting after them is no more than a share.

    S/(τC + S) ≤ share. The paper's rule of thumb, τ ≈ 5S for C = 1 s, is a share of a sixth.

    Args:
        step_s: C, seconds of a local step.
        meeting_s: S, seconds in which values are exchanged.
        share: of all time, in (0, 1).

    Raises:
        ValueError: a number out of range.
    """
    _check(step_s, meeting_s)
    if not 0 < share < 1:
        raise ValueError(f"the share of a meeting is in (0, 1), got {share}")
    steps = meeting_s * (1 - share) / (share * step_s)
    return max(1, math.ceil(steps * (1 - 1e-12)))  # not one more for a rounding


def meeting_share(step_s: float, meeting_s: float, tau: int) -> float:
    """S/(τC + S).

    Raises:
        ValueError: a number out of range.
    """
    _check(step_s, meeting_s, tau)
    return meeting_s / (tau * step_s + meeting_s)


def naive_speedup(step_s: float, meeting_s: float, ranks: int) -> float:
    """Speed-up over one rank of parallel SGD, whose batch is divided among the ranks, and which meets in every step.

    C/(C/K + S): the paper's bound, in which batches cannot be divided below what a device does at full speed.

    Raises:
        ValueError: a number out of range.
    """
    _check(step_s, meeting_s, ranks)
    return step_s / (step_s / ranks + meeting_s)


def at_most(step_s: float, meeting_s: float, tau: int, ranks: int) -> float:
    """Speed-up of local steps over one rank, if τ steps of each of K ranks were worth Kτ of one: K·τC/(τC + S).

    Raises:
        ValueError: a number out of range.
    """
    _check(step_s, meeting_s, ranks)
    return ranks * (1 - meeting_share(step_s, meeting_s, tau))


def speedup(step_s: float, meeting_s: float, tau: int, serial_steps: float, meetings: float) -> float:
    """Speed-up of local steps over one rank: N_a·C / ((τC + S)·M_a), to the same accuracy a.

    (The paper's figure 3 is captioned with the inverse, τM_a/N_a.)

    Args:
        step_s: C.
        meeting_s: S.
        tau: τ.
        serial_steps: N_a, steps of one rank to a.
        meetings: M_a(K, τ), rounds of all ranks to it.

    Raises:
        ValueError: a number out of range.
    """
    _check(step_s, meeting_s, tau)
    if not (serial_steps > 0 and meetings > 0):
        raise ValueError(f"steps and meetings to an accuracy are above 0, got {serial_steps} and {meetings}")
    return serial_steps * step_s / ((tau * step_s + meeting_s) * meetings)


def _check(step_s: float, meeting_s: float, count: int = 1) -> None:
    if not 0 < step_s < math.inf:
        raise ValueError(f"a step takes more than 0 seconds, got {step_s}")
    if not 0 <= meeting_s < math.inf:
        raise ValueError(f"a meeting takes 0 seconds or more, got {meeting_s}")
    if count < 1:
        raise ValueError(f"there is 1 or more, got {count}")


_ROUNDS = 5
_CALM = 0.2  # τ stays where another would be nearer than this share of it


@dataclasses.dataclass(frozen=True)
class MeasuredTau:
    """τ by measurement.

    Args:
        share: of all time that meetings may take, in (0, 1); SparkNet's rule of thumb is a sixth.
        first: steps to the first meeting, when nothing is known yet.
        most: steps between two meetings, at most.
    """

    share: float = 1 / 6
    first: int = 10
    most: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"tau=auto: share must be in (0, 1), got {self.share}")
        if not 1 <= self.first <= self.most:
            raise ValueError(f"tau=auto: 1 ≤ first ≤ most, got first={self.first}, most={self.most}")


@dataclasses.dataclass(frozen=True)
class SyncMeasurements:
    """Measurements of all ranks together.

    Attributes:
        step_s: C, seconds of a step.
        meeting_s: S, seconds of a meeting.
    """

    step_s: float
    meeting_s: float

    @classmethod
    def of_all(cls, posts: Sequence[Mapping[str, float]]) -> SyncMeasurements:
        """The slowest rank's step; and the meeting of who came last, for he alone did not wait for others in it."""
        return cls(max(p["step_s"] for p in posts), min(p["meeting_s"] for p in posts))


class SyncSchedule:
    """A state machine without a clock.

    A round of τ steps has one meeting of each fragment, at equal distances; the last one's ends it.

    Args:
        tau: as the user has it: a number, ``auto``, or ``auto:share=0.1,first=10,most=1000``.
        ranks: that meet.
        fragments: of the model.

    Raises:
        ValueError: it is none of these; there are more fragments than steps in a round.
    """

    def __init__(self, tau: int | str, ranks: int, fragments: int = 1) -> None:
        self.auto = _auto(tau) if isinstance(tau, str) else None
        self.told = f"auto:{_options(self.auto)}" if self.auto else str(tau)
        self.tau = self.auto.first if self.auto else int(tau)
        if self.tau < 1:
            raise ValueError(f"tau is 1 step or more, got {tau}")
        if not 1 <= fragments <= self.tau:
            raise ValueError(f"fragments meet one after another within tau={self.tau} steps: 1 to {self.tau} of them")
        self.since, self._ranks, self._fragments = 0, ranks, fragments
        self.figures: SyncMeasurements | None = None
        self._steps: collections.deque[float] = collections.deque(maxlen=_ROUNDS)
        self._meetings: collections.deque[float] = collections.deque(maxlen=_ROUNDS)

    def step(self) -> list[int]:
        """A step is done; the fragments whose turn it is to meet."""
        self.since += 1
        due = [f for f in range(self._fragments) if self.since == -(-(f + 1) * self.tau // self._fragments)]
        if self.since >= self.tau:
            self.since = 0
        return due

    def met(self, step_s: float, meeting_s: float) -> None:
        """A round is over: seconds of one of its steps, and of the meeting."""
        self._steps.append(max(step_s, 1e-9))
        self._meetings.append(meeting_s)

    def mine(self) -> dict[str, float]:
        """Figures that this rank posts."""
        return {"step_s": statistics.median(self._steps), "meeting_s": statistics.median(self._meetings)}

    def decide(self, posts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """The next τ, by all ranks' figures; one rank decides for all."""
        auto, found = self.auto or MeasuredTau(), SyncMeasurements.of_all(posts)
        best = min(auto.most, steps_for(found.step_s, found.meeting_s, auto.share))
        calm = self.figures is not None and abs(best - self.tau) <= _CALM * self.tau
        return {"tau": self.tau if calm else best, **dataclasses.asdict(found)}

    def follow(self, decision: Mapping[str, Any]) -> bool:
        """Takes it over; whether τ is another now."""
        before, self.tau = self.tau, int(decision["tau"])
        self.figures = SyncMeasurements(decision["step_s"], decision["meeting_s"])
        return self.tau != before

    def state_dict(self) -> dict[str, Any]:
        """State that a run needs to go on."""
        return {"tau": self.tau, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave."""
        self.tau, self.since = state["tau"], state["since"]

    def __str__(self) -> str:
        """Schedule in words, with SparkNet's model of what it gains (ICLR 2016, section 2.3), once it is measured."""
        if self.figures is None:
            return f"a meeting after every {self.tau} steps" + (", not measured yet" if self.auto else "")
        c, s, k = self.figures.step_s, self.figures.meeting_s, self._ranks
        return (
            f"a meeting after every {self.tau} steps: a step takes {c:.3g} s and a meeting {s:.3g} s, "
            f"{100 * meeting_share(c, s, self.tau):.0f} % of all time; {k} ranks are at most "
            f"{at_most(c, s, self.tau, k):.2f} times as fast as one, and {naive_speedup(c, s, k):.2f} times "
            "if they divided its batch and met in every step"
        )


def _auto(spec: str) -> MeasuredTau:
    name, options = split("tau", spec, "share")
    if name != "auto":
        raise ValueError(f"tau is a number of steps, or auto, or auto:share=0.1; got {spec!r}")
    return build(MeasuredTau, "tau=auto", options)


def _options(auto: MeasuredTau) -> str:
    return ",".join(f"{f.name}={getattr(auto, f.name):g}" for f in dataclasses.fields(auto))
