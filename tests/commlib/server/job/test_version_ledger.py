"""The ledger of a shard: what is applied when, once and in order; who may read; who comes and goes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import ProtocolError
from commlib.server.job.consistency import ASP, BSP, SSP, Consistency, make
from commlib.server.job.version_ledger import VersionLedger, fresh


def ledger(rule: Consistency, workers: int = 2) -> VersionLedger[str]:
    return VersionLedger(range(workers), rule.threshold())


def test_in_bulk_a_step_is_applied_once_all_have_pushed_it_and_in_the_order_of_workers() -> None:
    book = ledger(BSP(), 3)
    assert book.push(2, 0, "c") == []
    assert book.push(0, 0, "a") == []
    assert book.included == {0: 0, 1: 0, 2: 0}
    (applied,) = book.push(1, 0, "b")
    assert list(applied.items()) == [(0, "a"), (1, "b"), (2, "c")]
    assert book.included == {0: 1, 1: 1, 2: 1}


def test_otherwise_a_push_is_applied_at_once() -> None:
    book = ledger(SSP(3))
    assert book.push(1, 0, "b") == [{1: "b"}]
    assert book.push(1, 1, "b") == [{1: "b"}]
    assert book.included == {0: 0, 1: 2}


@pytest.mark.parametrize("spec", ["bsp", "ssp:2", "asp"])
def test_a_repeated_push_is_applied_once_and_one_too_early_is_refused(spec: str) -> None:
    book = ledger(make(spec))
    applied = [*book.push(0, 0, "a"), *book.push(0, 0, "again"), *book.push(1, 0, "b"), *book.push(0, 0, "again")]
    assert [value for step in applied for value in step.values()] == ["a", "b"]
    with pytest.raises(ProtocolError, match="worker 0 pushes step 3, and its step 1 has not come"):
        book.push(0, 3, "d")


def test_a_read_waits_for_the_slowest_only_so_far_as_the_rule_says() -> None:
    book = ledger(SSP(2))
    for stamp in range(3):
        assert book.may_read(0, stamp)
        book.push(0, stamp, "")
    assert not book.may_read(0, 3)  # worker 1 at 0, which is three behind
    book.push(1, 0, "")
    assert book.may_read(0, 3)
    assert book.may_read(1, 1)


def test_who_reads_gets_all_that_it_has_pushed_itself() -> None:
    book = ledger(ASP())
    assert not book.may_read(0, 1)
    book.push(0, 0, "")
    assert book.may_read(0, 1)
    assert fresh({0: 0, 1: 9}, 0, 1, None, own=False)


def test_a_worker_that_is_not_known_is_named() -> None:
    book = ledger(SSP(1))
    for call in (lambda: book.push(7, 0, ""), lambda: book.may_read(7, 0), lambda: book.leave(7)):
        with pytest.raises(ProtocolError, match=r"no worker 7 \(known: 0, 1\)"):
            call()


def test_when_a_worker_leaves_the_others_go_on_and_what_it_pushed_counts() -> None:
    book = ledger(BSP(), 3)
    book.push(0, 0, "a")
    book.push(2, 0, "c")
    assert book.leave(1) == [{0: "a", 2: "c"}]
    book.push(2, 1, "c")
    assert book.leave(2) == []
    assert book.push(0, 1, "a") == [{0: "a", 2: "c"}]  # pushed before it left
    assert book.included == {0: 2}


@pytest.mark.parametrize("spec", ["bsp", "ssp:3"])
def test_who_comes_begins_where_it_is_told_and_nobody_waits_for_it_before(spec: str) -> None:
    book = ledger(make(spec))
    for stamp in range(2):
        for worker in range(2):
            book.push(worker, stamp, "ab"[worker])
    book.join(2, 3)
    assert book.due(2) == 3
    applied = [step for worker in (0, 1) for step in book.push(worker, 2, "ab"[worker])]
    assert [w for step in applied for w in step] == [0, 1]
    assert book.push(2, 3, "c") == ([] if spec == "bsp" else [{2: "c"}])
    applied = [step for worker in (0, 1) for step in book.push(worker, 3, "ab"[worker])]
    assert applied[-1] == ({0: "a", 1: "b", 2: "c"} if spec == "bsp" else {1: "b"})


def test_in_bulk_what_a_worker_pushed_before_it_left_counts_and_is_not_its_own_when_it_comes_back() -> None:
    book = ledger(BSP())
    book.push(0, 0, "a")
    book.leave(0)
    book.join(0, 1)
    assert book.due(0) == 1
    assert book.push(1, 0, "b") == [{0: "a", 1: "b"}]
    assert book.push(0, 1, "a") == []
    assert book.push(1, 1, "b") == [{0: "a", 1: "b"}]


def test_in_bulk_a_step_that_waits_for_one_that_came_back_meanwhile_waits_no_more() -> None:
    book = ledger(BSP())  # of a replica that became the owner, and never knew that worker 0 was away
    assert book.push(1, 0, "b") == []
    assert book.join(0, 2) == [{1: "b"}]
    assert book.due(1) == 1


def test_when_all_have_left_and_another_comes_the_steps_go_on() -> None:
    book = ledger(BSP())
    for worker in range(2):
        book.push(worker, 0, "ab"[worker])
    book.leave(0)
    book.leave(1)
    book.join(5, 3)
    assert book.push(5, 3, "f") == [{5: "f"}]


def test_a_copy_of_a_ledger_knows_what_is_in_and_not_what_is_held() -> None:
    book, copy = ledger(BSP()), ledger(BSP())
    for worker in range(2):
        book.push(worker, 0, "ab"[worker])
    copy.follow({0: 0, 1: 0, 7: 0})  # the last has left
    assert copy.included == {0: 1, 1: 1}
    book.push(0, 1, "a")
    copy.load_state_dict(book.state_dict())
    assert (copy.due(0), book.due(0)) == (1, 2)


@given(st.integers(0, 1 << 32), st.integers(1, 4), st.sampled_from(["bsp", "ssp:1", "ssp:3", "asp"]))
def test_whatever_comes_and_goes_each_push_is_applied_once_and_a_workers_in_order(
    seed: int, workers: int, spec: str
) -> None:
    rng = random.Random(seed)
    book: VersionLedger[tuple[int, int]] = VersionLedger(range(workers), make(spec).threshold())
    pushed, applied = set(), list[tuple[int, int]]()
    here, highest = set(range(workers)), 0
    for _ in range(30):
        who = rng.randrange(workers)
        steps: list[dict[int, tuple[int, int]]] = []
        if who not in here:
            steps = book.join(who, highest)
            here.add(who)
        elif rng.random() < 0.05:
            steps = book.join(who, highest)  # it was away, and nobody knew
        elif rng.random() < 0.1:
            steps = book.leave(who)
            here.discard(who)
        else:
            stamp = book.due(who)
            if (who, stamp - 1) in pushed and rng.random() < 0.2:
                stamp -= 1  # once more
            pushed.add((who, stamp))
            highest = max(highest, stamp + 1)
            steps = book.push(who, stamp, (who, stamp))
        for step in steps:
            assert list(step) == sorted(step)
            applied += step.values()
    assert len(applied) == len(set(applied))
    assert set(applied) <= pushed
    for who in range(workers):
        stamps = [stamp for w, stamp in applied if w == who]
        assert stamps == sorted(stamps)
    if spec != "bsp":
        assert set(applied) == pushed


def test_the_rule_holds_inside_a_group_and_others_are_not_waited_for() -> None:
    ledger: VersionLedger[str] = VersionLedger(range(4), make("bsp").threshold(), lambda worker: worker // 2)
    assert ledger.push(0, 0, "a0") == []
    assert ledger.push(2, 0, "c0") == []
    assert ledger.push(3, 0, "d0") == [{2: "c0", 3: "d0"}]
    assert [ledger.may_read(w, 1) for w in (2, 3)] == [True, True]
    assert not ledger.may_read(2, 1, within=0)  # that is a question for all
    assert ledger.push(2, 1, "c1") == []
    assert ledger.due(2) == 2
    assert ledger.push(1, 0, "b0") == [{0: "a0", 1: "b0"}]
    assert ledger.may_read(2, 1, within=0)
    assert ledger.peers(0) == {0: 1, 1: 1}
    assert ledger.leave(3) == [{2: "c1"}]
