"""Codecs of a sharded model's units, chosen by trials: from figures to decisions. A pure state machine.

::

    watch: as they are ── each codec, on all units ──▶ each unit's best ──▶ codecs of parameters ──▶ rounds ──▶ steady
                 ▲                                                                                              │
                 └──────────────────────── steps take longer or shorter, twice ─────────────────────────────────┘

FSDP2 asks for one collective after another, so what a unit's takes by a codec is a figure of that unit alone: one trial
of a codec, on all units, tells it of each. Whether steps become shorter is for whole steps to say: the best of all that
was tried takes turns with what was there before (plain FSDP2, if no codec was named), and stays only if it wins. Rank 0
decides; it sees neither clocks nor other ranks.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import Any

_GAIN = 0.95  # of a unit's time as it is: a codec that takes more is not worth the loss
_HOPELESS = 1.1  # in the median: no further round is made
_CLEAR = 0.6  # of a plain step's time: faster than that is believed at once
_WON = 0.98
_ROUNDS = 3
_DRIFT = 1.2  # steps this much longer or shorter, twice, are a reason to measure again
_SHARE = 0.01  # of all time, for measuring again
_SAMPLE_S, _LEAST, _MOST = 1.0, 3, 20  # a trial: so many seconds, in so many steps
_WATCH_S, _REVIEW = 2.0, (10, 30)  # the same between two reviews when all is settled


@dataclasses.dataclass(frozen=True)
class Turn:
    """Decision that holds from the next step on, until the next review.

    Attributes:
        routes: unit → its codec, for those whose gradients do not go as they are.
        values: codec of parameters; empty: as they are.
        steps: steps until the next review.
        skip: so many of them are not counted: the first by other codecs is never a usual one.
        phase: watch, trial, plain again, steady or failed.
        step_s: seconds of a step by what is chosen, and without it; None before both are known.
        said: what has happened, for the log; empty if nothing has.
    """

    routes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    values: str = ""
    steps: int = _LEAST + 2
    skip: int = 2
    phase: str = "watch"
    step_s: tuple[float, float] | None = None
    said: str = ""

    def to_wire(self) -> dict[str, Any]:
        """Decision as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, x: Mapping[str, Any]) -> Turn:
        """Read a decision from :meth:`to_wire`, through msgpack."""
        return cls(**{**x, "step_s": None if x["step_s"] is None else (x["step_s"][0], x["step_s"][1])})


@dataclasses.dataclass(frozen=True)
class UnitTimes:
    """Medians over steps.

    Attributes:
        steps: how many.
        span: seconds from the end of a backward pass to the next one's.
        units: unit → seconds in which its gradients were exchanged.
        summed: whether a rank had summed gradients over several backward passes, in any step.
    """

    steps: int
    span: float
    units: Mapping[str, float]
    summed: bool = False

    @classmethod
    def of(cls, spans: Sequence[float], units: Mapping[str, Sequence[float]], *, summed: bool = False) -> UnitTimes:
        """Figures of one rank; ``units`` has the seconds of each exchange."""
        span = statistics.median(spans) if spans else 0.0
        return cls(len(spans), span, {unit: statistics.median(took) for unit, took in units.items() if took}, summed)

    @classmethod
    def of_all(cls, ranks: Sequence[UnitTimes]) -> UnitTimes:
        """Figures of all ranks: steps take what the slowest needs, and a unit what it takes when nobody is waited
        for."""
        units = {unit for rank in ranks for unit in rank.units}
        least = {u: min(rank.units[u] for rank in ranks if u in rank.units) for u in units}
        summed = any(rank.summed for rank in ranks)
        return cls(min(rank.steps for rank in ranks), max(rank.span for rank in ranks), least, summed)

    def or_before(self, before: UnitTimes) -> UnitTimes:
        """The lesser of both times, of steps and of each unit."""
        least = {unit: min(s, before.units.get(unit, s)) for unit, s in self.units.items()}
        return UnitTimes(self.steps, min(self.span, before.span), least, self.summed)

    def to_wire(self) -> dict[str, Any]:
        """Figures as plain values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class _Arm:
    """Arm of the trials: unit → codec, the codec of parameters, and the seconds that a step took."""

    routes: Mapping[str, str]
    values: str = ""
    span: float = 0.0

    def __str__(self) -> str:
        codecs = sorted(set(self.routes.values()))
        by = [f"gradients of {list(self.routes.values()).count(c)} units by {c}" for c in codecs]
        return ", ".join([*by, *([f"parameters by {self.values}"] if self.values else [])]) or "as they are"


_AS_THEY_ARE = _Arm({})


class CodecTrials:
    """Trials of one sharded model's codecs.

    Args:
        gradients: codec → the units whose gradients it may carry.
        values: codecs of parameters that may be chosen.
    """

    def __init__(self, gradients: Mapping[str, Sequence[str]], values: Sequence[str]) -> None:
        self._gradients, self._values = gradients, tuple(values)
        self._spent = 0.0  # seconds that the last trials took, plain steps included
        self._course = self._forever()
        self._now = next(self._course)

    def first(self) -> Turn:
        """Before any review; the same on every rank."""
        return self._now

    def review(self, f: UnitTimes) -> Turn:
        """The next decision.

        Args:
            f: all ranks' figures of the steps since the last.
        """
        if f.steps == 0:  # they broke off
            self._now = dataclasses.replace(self._now, steps=max(2, self._now.steps), said="")
            return self._now
        if self._now.phase != "steady":
            self._spent += f.span * f.steps
        self._now = self._course.send(f)
        return self._now

    def _forever(self) -> Generator[Turn, UnitTimes, None]:
        credit, said = 1.0, ""  # times that all may be measured again
        while True:
            self._spent = 0.0
            arm, plain_s, why = yield from self._chosen((yield Turn(said=said)))
            steady = Turn(arm.routes, arm.values, _REVIEW[0], 1, "steady", (arm.span, plain_s), why)
            f = yield steady
            reference, suspected = f.span, False
            while True:
                off = not 1 / _DRIFT < f.span / reference < _DRIFT
                if off and suspected and credit >= 1:
                    break
                suspected = off
                credit = min(1.0, credit + _SHARE * f.steps * f.span / self._spent)
                steps = _samples(f.span, _WATCH_S, *_REVIEW)
                f = yield dataclasses.replace(steady, steps=steps, skip=0, said="")
            credit, said = 0.0, f"steps take {_ms(f.span)} instead of {_ms(reference)}: all is measured again"

    def _chosen(self, plain: UnitTimes) -> Generator[Turn, UnitTimes, tuple[_Arm, float, str]]:
        """The best of all that is tried, what a plain step takes, and what there is to say."""
        tried, took = list[_Arm](), dict[str, Mapping[str, float]]()
        for codec, units in self._gradients.items():
            arm = _Arm(dict.fromkeys(units, codec))
            f = yield _trial(arm, plain)
            tried.append(dataclasses.replace(arm, span=f.span))
            took[codec] = f.units
        if tried:  # the plain steps before may have been the first of all, which take longer
            plain = (yield _trial(_AS_THEY_ARE, plain)).or_before(plain)
            arm = _Arm(self._mixture(took, plain))
            if arm.routes and all(arm.routes != other.routes for other in tried):
                tried.append(dataclasses.replace(arm, span=(yield _trial(arm, plain)).span))
        best = min([*tried, _Arm({}, span=plain.span)], key=_span)
        for values in self._values:
            arm = dataclasses.replace(best, values=values)
            tried.append(dataclasses.replace(arm, span=(yield _trial(arm, plain)).span))
        best = min(tried, key=_span)
        ratios = [best.span / plain.span]
        while ratios[-1] >= _CLEAR and len(ratios) < _ROUNDS and statistics.median(ratios) < _HOPELESS:
            plain = yield _trial(_AS_THEY_ARE, plain)
            best = dataclasses.replace(best, span=(yield _trial(best, plain)).span)
            ratios.append(best.span / plain.span)
        if ratios[-1] < _CLEAR or statistics.median(ratios) < _WON:
            return best, plain.span, f"{best}: {_ms(best.span)} a step, {_ms(plain.span)} without"
        lost = f"best of the codecs is {best}: {_ms(best.span)} a step, and {_ms(plain.span)} without"
        return dataclasses.replace(_AS_THEY_ARE, span=plain.span), plain.span, lost

    def _mixture(self, took: Mapping[str, Mapping[str, float]], plain: UnitTimes) -> dict[str, str]:
        """Unit → the codec by which its exchange takes least, where that is clearly less than as it is."""
        found = {}
        for unit, seconds in plain.units.items():
            by = {c: took[c][unit] for c, units in self._gradients.items() if unit in units and unit in took[c]}
            best = min(by, key=by.__getitem__, default=None)
            if best is not None and by[best] < _GAIN * seconds:
                found[unit] = best
        return found


def _trial(arm: _Arm, plain: UnitTimes) -> Turn:
    """Some steps by an arm; the first is not counted."""
    steps = 1 + _samples(plain.span, _SAMPLE_S, _LEAST, _MOST)
    phase = "trial" if arm.routes or arm.values else "plain again"
    return Turn(arm.routes, arm.values, steps, 1, phase)


def _samples(span: float, seconds: float, least: int, most: int) -> int:
    """Number of steps that make up so many seconds."""
    return min(most, max(least, math.ceil(seconds / span))) if span > 0 else most


def _span(arm: _Arm) -> float:
    return arm.span


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
