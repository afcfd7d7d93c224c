"""``commlib plan --algorithm``: when an accuracy is reached, by S, C and what was measured of rounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from commlib.bench.results.table import Row
from commlib.errors import unknown

from . import convergence_model
from .assumptions import Assumptions
from .convergence_model import ALGORITHMS, LOCAL, NAIVE, Table
from .model import LayeredModel
from .schemes import BYTES, alone_s

RANKS = 5
ACCURACY = 0.95
TIMES = (0.01, 0.1, 1.0, 10.0, 100.0)
"""Of C: values of S to look at, unless one is given."""


@dataclasses.dataclass(frozen=True)
class Question:
    """Question of how long each algorithm needs to an accuracy.

    Args:
        algorithms: of :data:`~commlib.bench.plan.convergence_model.ALGORITHMS`.
        ranks: K.
        step_s: C.
        meetings_s: S, one or several.
        tau: of local steps; None: all that were measured.
        accuracy: a.

    Raises:
        ValueError: a number out of range, or an unknown algorithm; which.
    """

    algorithms: Sequence[str]
    ranks: int
    step_s: float
    meetings_s: Sequence[float]
    tau: int | None
    accuracy: float

    def __post_init__(self) -> None:
        for name in self.algorithms:
            if name not in ALGORITHMS:
                raise ValueError(unknown("algorithm", name, ALGORITHMS))
        if not 0 < self.step_s < math.inf:
            raise ValueError(f"--step-s is above 0 (C, seconds of a step of one rank), got {self.step_s:g}")
        if not all(0 <= s < math.inf for s in self.meetings_s):
            raise ValueError(f"--meeting-s is 0 or more (S, seconds of an exchange), got {min(self.meetings_s):g}")
        if self.tau is not None and self.tau < 1:
            raise ValueError(f"--tau is 1 step or more, got {self.tau}")

    @classmethod
    def of(
        cls,
        algorithms: Sequence[str],
        ranks: Sequence[int],
        step_s: float | None,
        meeting_s: float | None,
        tau: int | None,
        accuracy: float,
        model: LayeredModel | None,
        setting: Assumptions,
    ) -> Question:
        """Make a question from options: C and S as given, or as a model and a link make them; else C is 1 s, and S of
        all sizes.

        Raises:
            ValueError: as above; or several numbers of ranks.
        """
        if len(ranks) != 1:
            raise ValueError(f"--algorithm is for one number of ranks, got {', '.join(map(str, ranks))}")
        if step_s is None:
            step_s = 1.0 if model is None else alone_s(model, setting)
        meetings = [meeting_s] if meeting_s is not None else [step_s * times for times in TIMES]
        if meeting_s is None and model is not None:
            meetings = [ring_s(model.parameters * BYTES, ranks[0], setting)]
        return cls(tuple(dict.fromkeys(algorithms)), ranks[0], step_s, meetings, tau, accuracy)

    def curves(self, table: Table) -> list[tuple[str, int]]:
        """Algorithm and τ of every line, naive first.

        Raises:
            ValueError: something was not measured.
        """
        found = [(NAIVE, 1)]
        for name in self.algorithms:
            taus = (self.tau,) if name in LOCAL and self.tau is not None else table.taus(name, self.ranks) or (1,)
            found += [(name, tau) for tau in taus if name != NAIVE]
        for name, tau in found:
            table.rounds(name, self.ranks, tau)  # or raises
        return found


def ring_s(nbytes: int, ranks: int, setting: Assumptions) -> float:
    """Seconds in which all values are averaged, with nothing beside it."""
    return 2 * (ranks - 1) / ranks * nbytes * 8 / (setting.gbit * 1e9) + 2 * (ranks - 1) * setting.latency_s


def answer(asked: Question, table: Table) -> list[Row]:
    """A row for every algorithm, τ and S. What was not reached, or never is, is None.

    Raises:
        ValueError: nothing is known of that accuracy, or of such ranks or τ.
    """
    if asked.accuracy not in table.serial:
        known = ", ".join(f"{a:g}" for a in table.serial)
        raise ValueError(f"--accuracy: one rank was not seen to reach {asked.accuracy:g}; there are {known}")
    alone = table.serial[asked.accuracy] * asked.step_s
    rows: list[Row] = []
    for name, tau in asked.curves(table):
        for meeting in asked.meetings_s:
            took = convergence_model.seconds_to(table, name, asked.ranks, tau, asked.step_s, meeting).get(
                asked.accuracy
            )
            rows.append(
                {
                    "algorithm": name,
                    "ranks": asked.ranks,
                    "tau": tau,
                    "step_s": asked.step_s,
                    "meeting_s": meeting,
                    "rounds": table.rounds(name, asked.ranks, tau).get(asked.accuracy),
                    "seconds": took,
                    "speedup": None if took is None else alone / took,
                    "beats_naive_from_s": convergence_model.crossover(
                        table, name, asked.ranks, tau, asked.accuracy, asked.step_s
                    ),
                }
            )
    return rows


def for_people(asked: Question, rows: Sequence[Row], whose: str) -> tuple[str, list[Row]]:
    """A line on what was asked, and the rows as a table: a column for every S. ``whose`` the rounds are, in words."""
    about = (
        f"time to {100 * asked.accuracy:g} % on {asked.ranks} ranks, over one rank: C = {asked.step_s:.4g} s a step; "
        f"rounds of {whose}, times by SparkNet's model\n"
    )
    shown: list[Row] = []
    for name, tau in dict.fromkeys((r["algorithm"], r["tau"]) for r in rows):
        its = [r for r in rows if (r["algorithm"], r["tau"]) == (name, tau)]
        first = its[0]["beats_naive_from_s"]
        line: dict[str, object] = {"algorithm": name, "tau": tau, "rounds": _told(its[0]["rounds"])}
        line |= {f"S={r['meeting_s']:.3g} s": _told(r["speedup"]) for r in its}
        line["beats naive from S"] = "-" if first is None else f"{first:.3g} s"
        shown.append(line)
    return about, shown


def _told(value: object) -> str:
    return "not reached" if value is None else f"{value:.4g}"
