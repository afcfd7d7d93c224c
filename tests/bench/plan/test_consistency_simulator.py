"""What workers read, under random delays, is what the rules promise; and how much time they save."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.plan.consistency_simulator import SimulatedRun, simulate
from commlib.server.job.consistency import ASP, BSP, DTSSP, SSP, WSP, Consistency, Downpour, make

rules = st.one_of(
    st.just(BSP()),
    st.just(ASP()),
    st.builds(SSP, st.integers(0, 4)),
    st.builds(DTSSP, st.integers(1, 3), st.integers(3, 5)),
    st.builds(WSP, st.integers(0, 2), st.integers(0, 3)),
    st.builds(Downpour, st.integers(1, 3), st.integers(1, 3)),
)


def at_random(rule: Consistency, workers: int, steps: int, rng: random.Random) -> SimulatedRun:
    return simulate(
        rule,
        workers,
        steps,
        lambda worker, step: rng.choice([0.1, 1.0, 10.0]),
        travel=lambda: rng.choice([0.0, 0.1, 3.0]),
        evaluate=lambda n: rng.random(),
    )


@given(rules, st.integers(1, 4), st.integers(1, 12), st.integers(0, 1 << 32))
def test_a_read_has_all_that_it_must_have_and_nothing_that_it_cannot(
    rule: Consistency, workers: int, steps: int, seed: int
) -> None:
    run = at_random(rule, workers, steps, random.Random(seed))
    bound = rule.most if isinstance(rule, DTSSP) else rule.threshold().value
    for read in run.reads:
        assert read.included[read.worker] >= read.clock
        if bound is not None:
            others = [n for worker, n in read.included.items() if worker != read.worker]
            assert all(n >= read.clock - bound for n in others), "stamped ≤ c − s − 1: all"
            # A worker at clock c pushes stamp c before it reads again: so c + s is in, and not c + s + 1.
            assert all(n - 1 <= read.clock + bound for n in others), "stamped > c + s: none"


@given(rules, st.integers(1, 4), st.integers(1, 12), st.integers(0, 1 << 32))
def test_every_push_is_applied_once_and_nobody_waits_for_ever(
    rule: Consistency, workers: int, steps: int, seed: int
) -> None:
    applied = [push for group in at_random(rule, workers, steps, random.Random(seed)).applied for push in group.items()]
    assert sorted(applied) == [(w, t) for w in range(workers) for t in range(steps // rule.push_every)]


@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 1 << 32))
def test_in_bulk_a_read_has_exactly_the_steps_before_and_groups_are_whole_steps(
    workers: int, steps: int, seed: int
) -> None:
    run = at_random(BSP(), workers, steps, random.Random(seed))
    assert all(set(read.included.values()) == {read.clock} for read in run.reads)
    assert run.applied == [dict.fromkeys(range(workers), t) for t in range(steps)]


@pytest.mark.parametrize("distance", range(3))
@pytest.mark.parametrize("local", range(4))
def test_a_minibatch_misses_as_many_of_anothers_as_the_formula_says_and_no_more(distance: int, local: int) -> None:
    """HetPipe: s_global = (D + 1)(s_local + 1) + s_local − 1, attained where the other worker is far slower."""
    rule = WSP(distance, local)
    run = simulate(rule, 2, 40, lambda worker, step: 100.0 if worker else 1.0)
    reads = {read.step: read.included[1] * rule.push_every for read in run.reads if read.worker == 0}
    most, seen = 0, 0
    for step in range(40):
        seen = reads.get(step, seen)
        most = max(most, step - seen)
    assert most == rule.staleness


def test_a_pipeline_has_as_many_minibatches_under_way_as_it_has_room_for() -> None:
    assert simulate(WSP(0, 0), 1, 8, lambda worker, step: 1.0).seconds == 8.0
    assert simulate(WSP(0, 3), 1, 8, lambda worker, step: 1.0).seconds == 2.0


def test_downpour_reads_and_pushes_as_often_as_it_says() -> None:
    run = simulate(Downpour(push=3, fetch=2), 1, 12, lambda worker, step: 1.0)
    assert [read.step for read in run.reads] == [0, 2, 4, 6, 8, 10]
    assert len(run.applied) == 4


def test_with_random_pauses_more_staleness_is_less_time_and_the_dynamic_one_is_between_its_bounds() -> None:
    """Of 16 workers each pauses in 5 % of its steps, which then take ten times as long."""

    def seconds(spec: str, seed: int) -> float:
        rng = random.Random(seed)
        took = [[10.0 if rng.random() < 0.05 else 1.0 for _ in range(150)] for _ in range(16)]
        run = simulate(
            make(spec), 16, 150, lambda worker, step: took[worker][step], evaluate=lambda n: min(0.95, 0.1 * 1.1**n)
        )
        return run.seconds

    bulk, stale, dynamic, most = (
        statistics.mean(seconds(spec, seed) for seed in range(3)) for spec in ("bsp", "ssp:3", "dtssp", "ssp:10")
    )
    assert most <= dynamic < 0.86 * stale
    assert dynamic < 0.82 * bulk
    assert stale < bulk
