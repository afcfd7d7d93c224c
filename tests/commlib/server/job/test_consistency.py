"""Rules: what spec strings mean, how s follows the learning, and what is refused."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.server.job.consistency import ASP, BSP, DTSSP, RULES, SSP, WSP, Consistency, Downpour, make


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("bsp", BSP()),
        ("asp", ASP()),
        ("ssp", SSP(3)),
        ("ssp:5", SSP(5)),
        ("ssp:staleness=0", SSP(0)),
        ("dtssp:least=2,most=4,limit=1.5,on=loss,literal=on", DTSSP(2, 4, 1.5, "loss", True)),
        ("wsp:distance=1,local=3", WSP(1, 3)),
        ("downpour:push=5,fetch=2,time_lag=20", Downpour(5, 2, 20.0)),
    ],
)
def test_a_spec_string_says_which_rule(spec: str, rule: Consistency) -> None:
    assert make(spec) == rule
    assert make(rule) is rule


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("dtsp", r"'dtsp' \(known: asp, bsp, downpour, dtssp, groups, ssp, wsp; did you mean 'dtssp'\?\)"),
        ("bsp:3", "cannot read '3' in consistency 'bsp:3'"),
        ("ssp:3,4", "cannot read '4'"),
        ("ssp:-1", "staleness must be 0 or more, got -1"),
        ("ssp:three", "ssp: staleness must be a whole number, got 'three'"),
        ("ssp:slack=3", "unknown option 'slack'"),
        ("dtssp:least=0", "least must be 1 or more"),
        ("dtssp:least=5,most=4", "most must be 5 or more"),
        ("dtssp:limit=-1", "limit must be 0 % or more"),
        ("dtssp:limit=nan", "limit must be 0 % or more"),
        ("dtssp:on=time", "on must be accuracy or loss"),
        ("wsp:distance=-1", "distance must be 0 or more"),
        ("wsp:local=-1", "local must be 0 or more"),
        ("downpour:push=0", "push must be 1 or more"),
        ("downpour:fetch=0", "fetch must be 1 or more"),
        ("downpour:time_lag=inf", "time_lag must be 0 s or more"),
    ],
)
def test_what_is_no_rule_is_refused_in_words_that_say_why(spec: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(spec)


def test_how_often_a_worker_pushes_and_reads() -> None:
    found = {n: (r.push_every, r.fetch_every, r.depth, r.lag) for n, r in ((n, rule()) for n, rule in RULES.items())}
    assert set(found.values()) == {(1, 1, 1, None)}
    assert (Downpour(5, 2, 20.0).push_every, Downpour(5, 2, 20.0).fetch_every, Downpour(5, 2, 20.0).lag) == (5, 2, 20.0)
    assert (WSP(1, 3).push_every, WSP(1, 3).fetch_every, WSP(1, 3).depth) == (4, 4, 4)


def test_s_is_what_the_rule_says_and_stays_so() -> None:
    for rule, s in ((BSP(), 0), (ASP(), None), (SSP(4), 4), (WSP(2, 3), 2), (Downpour(), None)):
        threshold = rule.threshold()
        for accuracy in (0.1, 0.9, 0.1):
            threshold.observe(accuracy)
        assert threshold.value == s


def follow(rule: DTSSP, *metrics: float) -> list[int]:
    threshold, found = rule.threshold(), []
    for metric in metrics:
        threshold.observe(metric)
        assert threshold.value is not None
        found.append(threshold.value)
    return found


def test_s_rises_while_accuracy_gains_more_than_the_limit_and_falls_when_it_loses_as_much() -> None:
    assert follow(DTSSP(), 0.10, 0.20, 0.30, 0.31, 0.30, 0.20, 0.10) == [3, 4, 5, 5, 5, 4, 3]


def test_at_the_limit_itself_s_stays() -> None:
    assert follow(DTSSP(limit=50.0), 0.5, 0.75, 1.5) == [3, 3, 4]
    assert follow(DTSSP(limit=50.0, least=1), 1.0, 2.0, 1.0) == [1, 2, 2]


def test_on_loss_less_is_a_gain_and_so_it_is_for_the_printed_sign_on_accuracy() -> None:
    assert follow(DTSSP(on="loss"), 2.0, 1.0, 0.5, 1.0) == [3, 4, 5, 4]
    assert follow(DTSSP(literal=True), 2.0, 1.0, 0.5, 1.0) == [3, 4, 5, 4]
    assert follow(DTSSP(literal=True, on="loss"), 0.1, 0.2, 0.3) == [3, 4, 5]


def test_a_negative_metric_gains_by_growing() -> None:
    assert follow(DTSSP(), -2.0, -1.0, -2.0) == [3, 4, 3]


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf])
def test_what_is_no_result_and_a_gain_over_nothing_change_nothing(nothing: float) -> None:
    assert follow(DTSSP(), 0.1, nothing, 0.2) == [3, 3, 4]
    assert follow(DTSSP(), 0.0, 0.5, 1.0) == [3, 3, 4]


@given(st.lists(st.floats(allow_nan=True)), st.integers(1, 5), st.integers(0, 5), st.booleans(), st.booleans())
def test_s_never_leaves_its_bounds_and_moves_by_one(
    metrics: list[float], least: int, more: int, loss: bool, literal: bool
) -> None:
    found = follow(DTSSP(least, least + more, 5.0, "loss" if loss else "accuracy", literal), *metrics)
    assert all(least <= s <= least + more for s in found)
    assert all(abs(a - b) <= 1 for a, b in pairwise([least, *found]))


def test_servers_of_one_rule_have_a_threshold_each() -> None:
    rule = DTSSP()
    one, other = rule.threshold(), rule.threshold()
    one.observe(0.1)
    one.observe(0.2)
    assert (one.value, other.value) == (4, 3)


def test_the_global_staleness_of_waves_is_the_published_one() -> None:
    assert WSP(0, 0).staleness == 0
    assert WSP(2, 0).staleness == 2  # of one minibatch a wave: SSP's
    assert WSP(0, 3).staleness == 6
    assert WSP(1, 3).staleness == 10
