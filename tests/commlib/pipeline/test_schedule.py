"""Who is where; and stages that compute in this order never block each other, stay full, and see what WSP promises."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.pipeline.schedule import Pass, depth, passes, place
from commlib.server.job.consistency import WSP
from commlib.server.job.version_ledger import VersionLedger


def program(stage: int, local: int, waves: int) -> list[Pass]:
    """All of a stage's passes, wave by wave, and what is left at the end."""
    most, under_way, found = depth(stage, local), 0, list[Pass]()
    for wave in range(waves):
        found += passes(wave * (local + 1), local + 1, under_way, most)
        under_way = min(most, under_way + local + 1)
    count = waves * (local + 1)
    return found + [("backward", p) for p in range(count - under_way, count)]


def needs(kind: str, p: int, stage: int, stages: int) -> tuple[str, int, int] | None:
    """The pass of another stage that this one waits for."""
    other = stage - 1 if kind == "forward" else stage + 1
    return (kind, p, other) if 0 <= other < stages else None


@given(st.integers(1, 5), st.integers(0, 5), st.integers(1, 4), st.integers(0, 1 << 32))
def test_whoever_is_faster_all_passes_come_to_an_end_and_each_sees_at_least_what_the_rule_promises(
    stages: int, local: int, waves: int, seed: int
) -> None:
    rng = random.Random(seed)
    programs = [program(i, local, waves) for i in range(stages)]
    done: set[tuple[str, int, int]] = set()
    at, updates = [0] * stages, [0] * stages
    while any(a < len(p) for a, p in zip(at, programs, strict=True)):
        ready = [
            i
            for i in range(stages)
            if at[i] < len(programs[i]) and (needs(*programs[i][at[i]], i, stages) or ("", 0, 0)) in {*done, ("", 0, 0)}
        ]
        assert ready, "all wait for each other"
        i = rng.choice(ready)
        kind, p = programs[i][at[i]]
        if kind == "backward":
            assert updates[i] == p, "local updates are in the order of minibatches"
            updates[i] += 1
        else:
            assert updates[i] == max(0, p - depth(i, local) + 1) >= p - local  # those ≤ p − N: all
            assert p + 1 - updates[i] <= depth(i, local)
        done.add((kind, p, i))
        at[i] += 1


def seconds(stages: int, local: int, waves: int) -> int:
    """Of all, if each pass takes one, and nothing travels."""
    programs = [program(i, local, waves) for i in range(stages)]
    ends: dict[tuple[str, int, int], int] = {}
    free, at = [0] * stages, [0] * stages
    while any(a < len(p) for a, p in zip(at, programs, strict=True)):
        for i in range(stages):
            while at[i] < len(programs[i]):
                kind, p = programs[i][at[i]]
                before = needs(kind, p, i, stages)
                if before is not None and before not in ends:
                    break
                free[i] = ends[kind, p, i] = max(free[i], ends[before] if before else 0) + 1
                at[i] += 1
    return max(free)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_pipeline_with_room_for_as_many_minibatches_as_stages_is_filled_once(stages: int) -> None:
    for local in range(stages - 1, stages + 2):
        count = 5 * (local + 1)
        assert seconds(stages, local, 5) == 2 * (count + stages - 1)  # emptied by each wave: 5 × 2(local + stages)
    assert seconds(stages, 0, 5) == 2 * 5 * stages


@pytest.mark.parametrize("distance", range(3))
@pytest.mark.parametrize("local", range(4))
@pytest.mark.parametrize("stage", range(3))
def test_the_first_stage_misses_as_many_of_anothers_as_the_formula_says_and_later_ones_fewer(
    distance: int, local: int, stage: int
) -> None:
    """One virtual worker as far ahead of another as the ledger lets it, whenever the other has pushed m waves."""
    rule, wave = WSP(distance, local), local + 1
    ledger: VersionLedger[None] = VersionLedger(range(2), rule.threshold())
    clock, seen, most = 0, 0, 0
    for kind, p in program(stage, local, 12):
        if kind == "backward":
            if (p + 1) % wave == 0:
                ledger.push(0, clock, None)
                clock += 1
            continue
        while not ledger.may_read(0, clock):  # the other is pushed as late as it can be
            ledger.push(1, ledger.due(1), None)
        if p == 0 or (p - depth(stage, local) + 1) % wave == 0:  # the first pass after a wave's end
            seen = ledger.included[1] * wave
        most = max(most, p - seen)
    assert most == (distance + 1) * wave + depth(stage, local) - 2
    assert most == rule.staleness or stage
    assert most <= rule.staleness


def test_ranks_are_neighbours_in_a_pipeline_and_peers_at_a_stage() -> None:
    at = place(3, 6, 2)
    assert (at.stage, at.worker, at.first, at.last) == (1, 1, False, True)
    assert (at.pipeline, at.peers) == ([2, 3], [1, 3, 5])
    assert at.name(0) == "stage 0 of virtual worker 1 (rank 2)"


@pytest.mark.parametrize(
    ("size", "stages", "message"), [(4, 3, "4 ranks are no whole virtual workers of 3 stages"), (4, 0, "1 or more")]
)
def test_ranks_that_are_no_whole_virtual_workers_are_refused(size: int, stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(0, size, stages)
