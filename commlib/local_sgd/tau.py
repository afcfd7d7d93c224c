"""How many local steps between two meetings, and what they gain: SparkNet's model (ICLR 2016, section 2.3). Pure."""

from __future__ import annotations

import math


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
    """Of parallel SGD, whose batch is divided among the ranks, and which meets in every step, over one rank.

    C/(C/K + S): the paper's bound, in which batches cannot be divided below what a device does at full speed.

    Raises:
        ValueError: a number out of range.
    """
    _check(step_s, meeting_s, ranks)
    return step_s / (step_s / ranks + meeting_s)


def at_most(step_s: float, meeting_s: float, tau: int, ranks: int) -> float:
    """Of local steps over one rank, if τ steps of each of K ranks were worth Kτ of one: K·τC/(τC + S).

    Raises:
        ValueError: a number out of range.
    """
    _check(step_s, meeting_s, ranks)
    return ranks * (1 - meeting_share(step_s, meeting_s, tau))


def speedup(step_s: float, meeting_s: float, tau: int, serial_steps: float, meetings: float) -> float:
    """Of local steps over one rank: N_a·C / ((τC + S)·M_a), to the same accuracy a.

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
