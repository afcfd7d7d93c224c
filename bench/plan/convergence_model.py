"""How long training takes to an accuracy: seconds of a round from S and C, rounds from a table of real runs. Pure.

SparkNet's model (Moritz et al., ICLR 2016, section 2.3). C: seconds of a step with batch b on one rank; S: seconds of
an exchange of all values; τ: local steps between two. One rank takes N_a·C to accuracy a. Naive parallel SGD divides
the batch among K ranks: N_a(C/K + S). Local steps: M_a(τC + S), M_a the rounds to a.

Under a parameter server's rule a message takes S/2, and a round is what :mod:`commlib.bench.plan.consistency_simulator`
says that it takes with steps of 0.75 C to 1.25 C.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from commlib.bench.plan.consistency_simulator import simulate
from commlib.errors import unknown
from commlib.server.job.consistency import Consistency, make

SERIAL, NAIVE = "serial", "naive"
LOCAL: Mapping[str, str] = {"sparknet": "average", "easgd": "elastic", "diloco": "diloco"}
"""Algorithms of local steps → their rule, with its defaults."""
ASYNCHRONOUS: Mapping[str, str] = {"ssp": "ssp:3", "wsp": "wsp:local={local}"}
"""Algorithms of a parameter server → their rule, by τ."""
ALGORITHMS = (NAIVE, *LOCAL, *ASYNCHRONOUS)
_OURS = Path(__file__).with_name("convergence.csv")
_STEPS = 200  # in which a server's pace is seen


@dataclasses.dataclass(frozen=True)
class RoundsRow:
    """A line of the table.

    Args:
        algorithm: ``serial``, or one of :data:`LOCAL` and :data:`ASYNCHRONOUS`.
        ranks: K.
        tau: τ, steps of a round.
        accuracy: a, of 1.
        rounds: M_a; of ``serial`` N_a.
    """

    algorithm: str
    ranks: int
    tau: int
    accuracy: float
    rounds: float


class Table:
    """Rounds by algorithm, ranks, τ and accuracy.

    Raises:
        ValueError: nothing is known of one rank, to which all is compared.
    """

    def __init__(self, rows: Iterable[RoundsRow]) -> None:
        self._found: dict[tuple[str, int, int], dict[float, float]] = {}
        for row in rows:
            self._found.setdefault((row.algorithm, row.ranks, row.tau), {})[row.accuracy] = row.rounds
        if (SERIAL, 1, 1) not in self._found:
            raise ValueError(f"the table has no line of {SERIAL},1,1: one rank, to which all others are compared")

    @property
    def serial(self) -> Mapping[float, float]:
        """Accuracy → N_a."""
        return self._found[SERIAL, 1, 1]

    def rounds(self, algorithm: str, ranks: int, tau: int) -> Mapping[float, float]:
        """Accuracy → M_a; of ``naive``, the steps of one rank.

        Raises:
            ValueError: there is no such line; which there are.
        """
        if algorithm == NAIVE:
            return self.serial
        if (algorithm, ranks, tau) not in self._found:
            known = {k: self.taus(algorithm, k) for a, k, _ in sorted(self._found) if a == algorithm}
            there = "; ".join(f"{k} ranks: tau {', '.join(map(str, taus))}" for k, taus in known.items())
            raise ValueError(
                f"nothing was measured of {algorithm} with {ranks} ranks and tau {tau} ({there or 'nothing at all'}): "
                "measure it (python -m commlib.bench.plan.convergence_measure), and give the file as --table"
            )
        return self._found[algorithm, ranks, tau]

    def taus(self, algorithm: str, ranks: int) -> tuple[int, ...]:
        """All τ that were measured."""
        return tuple(sorted(t for a, k, t in self._found if (a, k) == (algorithm, ranks)))


def read(path: Path | None = None) -> Table:
    """A table from a file, or the one that comes with commlib.

    Raises:
        ValueError: it cannot be read, or is none; which line.
    """
    path = path or _OURS
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"--table: {str(path)!r} cannot be read ({e})") from e
    lines = csv.DictReader(io.StringIO(text))
    fields = [f.name for f in dataclasses.fields(RoundsRow)]
    if lines.fieldnames != fields:
        raise ValueError(f"a convergence table begins with the line {','.join(fields)}, and not {lines.fieldnames}")
    return Table(_row(i, line) for i, line in enumerate(lines, 2))


def _row(number: int, line: Mapping[str, str]) -> RoundsRow:
    try:
        row = RoundsRow(
            line["algorithm"], int(line["ranks"]), int(line["tau"]), float(line["accuracy"]), float(line["rounds"])
        )
    except (TypeError, ValueError) as e:
        raise ValueError(f"line {number} of the convergence table: {e}") from e
    if row.algorithm not in (SERIAL, *LOCAL, *ASYNCHRONOUS):
        raise ValueError(
            f"line {number} of the convergence table: "
            + unknown("algorithm", row.algorithm, (SERIAL, *LOCAL, *ASYNCHRONOUS))
        )
    if min(row.ranks, row.tau) < 1 or not 0 < row.accuracy <= 1 or not 0 < row.rounds < float("inf"):
        raise ValueError(f"line {number} of the convergence table has a number out of range: {dict(line)}")
    return row


def written(rows: Iterable[RoundsRow]) -> str:
    """A table as :func:`read` reads it."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(f.name for f in dataclasses.fields(RoundsRow))
    for row in rows:
        lines.writerow([f"{v:g}" if isinstance(v, float) else v for v in dataclasses.astuple(row)])
    return out.getvalue()


def consistency(algorithm: str, tau: int) -> Consistency:
    """A parameter server's rule."""
    return make(ASYNCHRONOUS[algorithm].format(local=tau - 1))


def round_s(algorithm: str, ranks: int, tau: int, step_s: float, meeting_s: float) -> float:
    """Seconds of a round: of all that is counted in the table as one."""
    if algorithm == NAIVE:
        return step_s / ranks + meeting_s
    if algorithm in LOCAL:
        return tau * step_s + meeting_s
    return _served_s(algorithm, ranks, tau, meeting_s / step_s) * step_s


def seconds_to(
    table: Table, algorithm: str, ranks: int, tau: int, step_s: float, meeting_s: float
) -> dict[float, float]:
    """Accuracy → seconds."""
    each = round_s(algorithm, ranks, tau, step_s, meeting_s)
    return {accuracy: count * each for accuracy, count in table.rounds(algorithm, ranks, tau).items()}


def crossover(table: Table, algorithm: str, ranks: int, tau: int, accuracy: float, step_s: float) -> float | None:
    """S from which local steps come to an accuracy sooner than naive parallel SGD, seconds; None: never, or not known.

    M(τC + S) = N(C/K + S), solved for S: C(τM − N/K)/(N − M); 0 where they are sooner on any link.
    """
    if algorithm not in LOCAL:
        return None
    serial, met = table.serial.get(accuracy), table.rounds(algorithm, ranks, tau).get(accuracy)
    if serial is None or met is None:
        return None
    ahead = tau * met - serial / ranks
    if met >= serial:
        return None
    return max(0.0, step_s * ahead / (serial - met))


@functools.lru_cache(maxsize=256)
def _served_s(algorithm: str, ranks: int, tau: int, meeting: float) -> float:
    """Seconds of a clock, where a step is 1."""
    rule, uneven = consistency(algorithm, tau), random.Random(0)
    run = simulate(rule, ranks, _STEPS, lambda _, __: uneven.uniform(0.75, 1.25), travel=lambda: meeting / 2)
    return run.seconds / _STEPS * rule.push_every


def grid(step_s: float, most: Sequence[float] = (0.001, 1000.0), points: int = 121) -> list[float]:
    """Values of S for a picture: even on a logarithmic axis, from a thousandth of C to a thousand of it."""
    low, high = most
    return [step_s * low * (high / low) ** (i / (points - 1)) for i in range(points)]
