"""Whose turn it is, with everything that can happen to a visit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.launch.processes import RankFailed
from commlib.bench.training.runner import Watcher
from commlib.bench.training.schedule import LEAST, MOST, Schedule, TrainingTrial, TrialOutcome
from commlib.bench.training.trial import Trouble
from commlib.bench.training.worker import Began

NAMES = ("ddp", "a", "b", "c")


def schedule(rounds: int | None = 3, budget_s: float = 60.0) -> Schedule:
    return Schedule(NAMES, rounds, 1, budget_s, first_limit_s=100.0, least_limit_s=10.0)


def fine(visit: TrainingTrial, seconds: float = 1.0) -> TrialOutcome:
    return TrialOutcome(visit, seconds, (0.1,))


def run(s: Schedule, outcome: Callable[[TrainingTrial], TrialOutcome | None] = fine) -> list[TrainingTrial]:
    """Every visit in turn; ``outcome`` gives None for one whose ranks had to be ended."""
    seen = []
    while (visit := s.next()) is not None:
        seen.append(visit)
        assert len(seen) < 1000
        result = outcome(visit)
        if result is None:
            s.lose(visit, "hung", 5.0)
        else:
            s.record(result)
    return seen


def test_every_round_has_everyone_once_and_turns_round() -> None:
    seen = run(schedule(3))
    assert [v.name for v in seen] == [*NAMES, *reversed(NAMES), *NAMES]
    assert [v.round for v in seen] == [0] * 4 + [1] * 4 + [2] * 4


def test_who_fails_has_no_further_turn_and_keeps_what_was_measured() -> None:
    s = schedule(3)
    seen = run(s, lambda v: TrialOutcome(v, 1.0, error="TypeError: no") if v == TrainingTrial(1, "b") else fine(v))
    assert [v.round for v in seen if v.name == "b"] == [0, 1]
    assert len(s.of("b")) == 1
    assert s.dropped == {"b": "TypeError: no"}
    assert all(len(s.of(n)) == 3 for n in ("ddp", "a", "c"))


@given(at=st.integers(0, 11), hangs=st.booleans())
def test_a_failure_or_a_hang_at_any_visit_ends_one_contender_only(at: int, hangs: bool) -> None:
    s = schedule(3)
    victim = TrainingTrial(at // 4, (NAMES if at // 4 % 2 == 0 else NAMES[::-1])[at % 4])
    seen = run(s, lambda v: fine(v) if v != victim else None if hangs else TrialOutcome(v, 1.0, error="no"))
    assert set(s.dropped) == {victim.name}
    if victim.name == "ddp":
        assert seen[-1] == victim  # without the baseline there is nothing to compare
    else:
        assert all(len(s.of(n)) == (victim.round if n == victim.name else 3) for n in NAMES)


def test_if_all_others_fail_the_baseline_runs_alone_to_the_end() -> None:
    s = schedule(2)
    run(s, lambda v: fine(v) if v.name == "ddp" else None)
    assert len(s.of("ddp")) == 2
    assert set(s.dropped) == {"a", "b", "c"}


@given(cost=st.floats(0.01, 1000.0), budget=st.floats(1.0, 1000.0))
def test_the_time_decides_over_the_rounds(cost: float, budget: float) -> None:
    s = schedule(None, budget)
    seen = run(s, lambda v: fine(v, cost))
    rounds = seen[-1].round + 1
    assert LEAST <= rounds <= MOST
    assert len(seen) == 4 * rounds
    if rounds > LEAST:
        assert len(seen) * cost <= budget * 1.0001


def test_lost_time_is_taken_from_the_budget_but_not_charged_again() -> None:
    s = schedule(None, 40.0)
    seen = run(s, lambda v: None if v.name == "a" else fine(v, 1.0))  # 5 s lost, rounds of 3 s
    assert seen[-1].round + 1 == (40 - 5) // 3


def test_who_is_faster_than_the_baseline_gets_more_steps_later_and_that_is_reckoned_with() -> None:
    s = Schedule(NAMES, None, 4, 140.0, first_limit_s=100.0, least_limit_s=10.0)
    assert s.steps_of("a") == 4
    step_s = {"ddp": 1.0, "a": 0.5, "b": 0.01, "c": 3.0}

    def visited(v: TrainingTrial) -> TrialOutcome:
        times = (step_s[v.name],) * s.steps_of(v.name)
        return TrialOutcome(v, sum(times), times)

    seen = run(s, visited)
    assert {n: s.steps_of(n) for n in NAMES} == {"ddp": 4, "a": 8, "b": 12, "c": 4}
    assert sum(o.seconds for o in s.outcomes) <= 140.0
    assert seen[-1].round + 1 == 7  # 18.04 s, then 20.12 s each


def test_limits_follow_the_baseline() -> None:
    s = schedule()
    assert s.limit_s("a") == 100.0
    s.record(fine(TrainingTrial(0, "ddp"), 1.0))
    assert s.limit_s("a") == 10.0
    s.record(fine(TrainingTrial(1, "ddp"), 5.0))
    assert s.limit_s("a") == 20.0


def test_a_bandwidth_manager_has_time_for_sixty_steps_of_trials_besides() -> None:
    s = dataclasses.replace(schedule(), managed=frozenset({"a"}))
    assert s.limit_s("a") == 100.0
    outcome = fine(TrainingTrial(0, "ddp"), 1.0)
    s.record(outcome)
    assert s.limit_s("b") == 10.0
    assert s.limit_s("a") == 10.0 + 60 * outcome.steps_s[0]


def test_visits_left_end_at_none() -> None:
    s = schedule(3)
    assert s.visits_left() == 12
    run(s, lambda v: None if v == TrainingTrial(1, "b") else fine(v))
    assert s.visits_left() == 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watch() -> tuple[Watcher, Clock]:
    clock = Clock()
    return Watcher(schedule(), lambda visit, s: None, clock), clock


def test_ranks_that_end_at_the_limit_have_hung() -> None:
    watcher, clock = watch()
    watcher(0, Began(TrainingTrial(0, "ddp"), 100.0))
    watcher(0, fine(TrainingTrial(0, "ddp")))
    watcher(0, Began(TrainingTrial(0, "a"), 10.0))
    clock.now = 10.0
    assert watcher.ended(RankFailed(2, "ended without a result (exit code 1)"))
    assert watcher.schedule.dropped == {"a": "hung, no end after 10 s"}
    assert watcher.schedule.next() == TrainingTrial(0, "b")
    assert watcher.schedule.lost_s == 10.0


def test_a_rank_that_said_why_is_quoted() -> None:
    watcher, clock = watch()
    watcher(0, Began(TrainingTrial(0, "a"), 10.0))
    watcher(1, Trouble(TrainingTrial(0, "a"), "TypeError: no"))
    clock.now = 10.0
    assert watcher.ended(RankFailed(0, "ended without a result (exit code 1)"))
    assert watcher.schedule.dropped == {"a": "rank 1: TypeError: no; the others hung"}


def test_a_rank_that_was_killed_comes_before_what_the_others_say_of_it() -> None:
    watcher, _ = watch()
    watcher(0, Began(TrainingTrial(0, "a"), 10.0))
    watcher(1, Trouble(TrainingTrial(0, "a"), "RuntimeError: Connection closed by peer"))
    assert watcher.ended(RankFailed(2, "was killed by SIGABRT"))
    assert watcher.schedule.dropped == {"a": "rank 2 was killed by SIGABRT"}


def test_an_end_between_visits_is_nobodys_fault() -> None:
    watcher, _ = watch()
    assert not watcher.ended(RankFailed(0, "failed: OSError"))
    watcher(0, Began(TrainingTrial(0, "ddp"), 100.0))
    watcher(0, fine(TrainingTrial(0, "ddp")))
    assert not watcher.ended(RankFailed(0, "failed: OSError"))
    assert watcher.schedule.dropped == {}
