"""The choice of routes: never much worse than dense, the best there is where that can be shown, and its reasons."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from commlib.planning.cost import choose as module
from commlib.planning.cost.choose import MARGIN, RouteChoice
from commlib.planning.cost.overlap import Bucket, TrainingPass, finish
from commlib.planning.cost.route_cost import Candidate

SOME = st.floats(0, 10)
Case = tuple[TrainingPass, dict[str, Candidate], dict[str, list[Candidate]]]


def dense(link_s: float, shared_s: float = 0.0) -> Candidate:
    return Candidate("dense", 0, link_s, shared_s)


def other(link_s: float, shared_s: float = 0.0, early: bool = True, **more: float) -> Candidate:
    return Candidate("factors", 0, link_s, shared_s, early=early, **more)


@st.composite
def passes(draw: st.DrawFn) -> TrainingPass:
    """Up to six layers in up to three buckets."""
    rows: dict[str, float] = {}
    buckets, now = [], 0.0
    for size in draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)):
        names = tuple(f"layer {len(rows) + i}" for i in range(size))
        for name in names:
            now += draw(SOME)
            rows[name] = now
        now += draw(SOME)
        buckets.append(Bucket(now, names))
    return TrainingPass(tuple(buckets), rows, now + draw(SOME), draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any pass and any costs; some layers have several other ways, or none."""
    p = draw(passes())
    plain = {n: dense(draw(SOME), 1.0) for n in p.rows}
    ways = st.builds(other, SOME, st.just(2.0), after_s=SOME, saved_s=SOME)
    return p, plain, {n: draw(st.lists(ways, max_size=2)) for n in p.rows if draw(st.booleans())}


@st.composite
def short_cuts(draw: st.DrawFn) -> Case:
    """Any pass; other ways cost nothing but time on the link, and less of it than dense."""
    p = draw(passes())
    plain = {n: dense(draw(SOME)) for n in p.rows}
    shares = {n: draw(st.floats(0, 0.99)) for n in p.rows if draw(st.booleans())}
    return p, plain, {n: [other(share * plain[n].link_s, early=draw(st.booleans()))] for n, share in shares.items()}


def choose(*args: Any, **more: Any) -> RouteChoice:
    """As few changes as possible; what the default does besides has tests of its own."""
    return module.choose(*args, frugal=True, **more)


def changed(ways: Mapping[str, Candidate]) -> set[str]:
    return {n for n, w in ways.items() if w.route != "dense"}


def best_of_all(p: TrainingPass, plain: Mapping[str, Candidate], others: Mapping[str, Sequence[Candidate]]) -> float:
    """The shortest step, by brute force."""
    return min(
        finish(p, dict(zip(plain, ways, strict=True)))
        for ways in itertools.product(*([plain[n], *others.get(n, ())] for n in plain))
    )


@given(cases(), st.floats(0, 0.3))
def test_a_choice_is_within_the_margin_of_dense_and_of_changing_all_that_gain(case: Case, margin: float) -> None:
    p, plain, others = case
    choice = choose(p, plain, others, margin)
    best = {n: min(ways, key=lambda w: w.alone_s) for n, ways in others.items() if ways}
    gaining = {n: w for n, w in best.items() if w.alone_s < plain[n].alone_s}
    assert choice.dense_s == finish(p, plain)
    assert choice.seconds == finish(p, choice.ways)
    assert choice.seconds <= (1 + margin) * min(choice.dense_s, finish(p, {**plain, **gaining})) + 1e-9
    assert changed(choice.ways) <= gaining.keys()
    assert choice.reasons.keys() == plain.keys()


@given(cases(), st.floats(0, 0.3))
def test_all_stays_dense_where_that_comes_within_what_a_trial_is_worth_and_else_nothing_is_different(
    case: Case, worth: float
) -> None:
    p, plain, others = case
    shortest = choose(p, plain, others, 0.0).seconds
    choice = choose(p, plain, others, 0.0, worth)
    if choice.dense_s <= (1 + worth) * shortest:
        assert choice.ways == plain
        assert choice.seconds == choice.dense_s
    else:
        assert choice == choose(p, plain, others, 0.0)


@given(cases())
def test_without_a_margin_no_step_is_predicted_longer_than_a_dense_one(case: Case) -> None:
    p, plain, others = case
    assert choose(p, plain, others, margin=0.0).seconds <= finish(p, plain)


@given(short_cuts())
def test_where_ways_only_shorten_transfers_the_choice_is_within_the_margin_of_the_best_of_all(case: Case) -> None:
    p, plain, others = case
    choice, best = choose(p, plain, others), best_of_all(p, plain, others)
    assert choice.seconds <= (1 + MARGIN) * best + 1e-9
    for name in changed(choice.ways):  # and each change is needed
        assert finish(p, {**choice.ways, name: plain[name]}) > (1 + MARGIN) * best - 1e-9


def test_a_way_that_costs_as_much_by_itself_is_not_looked_at_though_leaving_early_would_pay() -> None:
    """A limit of the search: it sorts layers by what a change saves without any overlap."""
    p = TrainingPass((Bucket(10, ("a",)),), {"a": 2}, 10, spare_cores=True)
    plain, others = {"a": dense(5)}, {"a": [other(5)]}
    assert best_of_all(p, plain, others) == 10  # from 2 to 7, beside the backward pass
    assert choose(p, plain, others).seconds == 15


def test_a_layer_whose_transfer_is_hidden_stays_dense_and_says_so() -> None:
    p = TrainingPass((Bucket(1, ("hidden",)), Bucket(10, ("last",))), {"hidden": 0, "last": 9}, 10)
    plain = {"hidden": dense(5), "last": dense(6)}
    choice = choose(p, plain, {"hidden": [other(1)], "last": [other(2)]})
    assert choice.ways == {"hidden": plain["hidden"], "last": other(2)}
    assert (choice.dense_s, choice.seconds) == (16, 11)
    assert "hides behind the backward pass" in choice.reasons["hidden"]
    assert choice.reasons["last"] == "costs 2e+03 ms, dense would cost 6e+03 ms"


def test_rows_are_worth_the_most_where_the_link_is_the_bottleneck() -> None:
    p = TrainingPass((Bucket(1, ("a", "b")), Bucket(2, ("c",))), {"a": 0.2, "b": 0.6, "c": 1.5}, 2)
    plain = {"a": dense(5), "b": dense(5), "c": dense(5)}
    choice = choose(p, plain, {n: [other(0.1)] for n in plain})
    assert changed(choice.ways) == {"a", "b", "c"}
    assert (choice.dense_s, choice.seconds) == (16, 2)


def test_nothing_changes_when_there_is_nothing_else() -> None:
    p = TrainingPass((Bucket(1, ("a",)), Bucket(2, ("b",))), {}, 2)
    plain = {"a": dense(9), "b": dense(9)}
    choice = choose(p, plain, {"b": []})
    assert choice.ways == choice.dense == plain
    assert choice.seconds == choice.dense_s == 19
    assert set(choice.reasons.values()) == {"has no other way"}


def test_what_costs_more_is_left_alone_and_both_costs_are_named() -> None:
    p = TrainingPass((Bucket(1, ("a",)),), {"a": 0.5}, 1)
    choice = choose(p, {"a": dense(2)}, {"a": [other(1, after_s=3)]})
    assert changed(choice.ways) == set()
    assert choice.reasons == {"a": "factors would cost 4e+03 ms, dense costs 2e+03 ms"}


def test_of_several_other_ways_a_layer_takes_the_cheapest() -> None:
    p = TrainingPass((Bucket(1, ("a",)),), {"a": 0.5}, 1)
    ways = [other(7), other(3, after_s=1, saved_s=0.5), other(5)]
    assert choose(p, {"a": dense(9)}, {"a": ways}).ways["a"] is ways[1]


def test_a_change_that_saves_less_than_the_margin_is_not_made() -> None:
    p = TrainingPass((Bucket(9, ("a",)),), {"a": 9}, 9)
    plain, others = {"a": dense(1.0)}, {"a": [other(0.9)]}  # a hundredth of the step
    assert changed(choose(p, plain, others).ways) == set()
    assert changed(choose(p, plain, others, margin=0.0).ways) == {"a"}


def test_of_two_changes_one_of_which_can_be_spared_the_larger_is_made() -> None:
    p = TrainingPass((Bucket(0, ("a", "b")),), {"a": 0, "b": 0}, 0)
    plain, others = {"a": dense(51), "b": dense(51.5)}, {"a": [other(50)], "b": [other(50)]}
    assert changed(choose(p, plain, others).ways) == {"b"}  # 101 is within the margin of 100, 102.5 is not


@pytest.mark.parametrize(("link_s", "instead"), [(6, 0.5), (1.4, 1.0)], ids=["gains most", "gains least"])
def test_products_that_hold_up_the_backward_pass_are_not_made_for_hidden_transfers(
    link_s: float, instead: float
) -> None:
    """Though each costs less than its transfer by itself; and the last layer is found whatever its place."""
    p = TrainingPass((Bucket(1, ("first", "second")), Bucket(10, ("last",))), {"first": 0, "second": 0, "last": 9}, 10)
    plain = {"first": dense(4), "second": dense(4), "last": dense(link_s)}
    product = [other(0.5, after_s=3)]
    choice = choose(p, plain, {"first": product, "second": product, "last": [other(instead)]})
    assert changed(choice.ways) == {"last"}
    assert (choice.dense_s, choice.seconds) == (10 + link_s, 10)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_dicts_does_not_matter_unless_gains_are_alike(case: Case, chance: object) -> None:
    p, plain, others = case
    gains = [plain[n].alone_s - min(w.alone_s for w in ways) for n, ways in others.items() if ways]
    assume(len(set(gains)) == len(gains))
    names, with_others = list(plain), list(others)
    chance.shuffle(names)  # type: ignore[attr-defined]
    chance.shuffle(with_others)  # type: ignore[attr-defined]
    assert choose(p, {n: plain[n] for n in names}, {n: others[n] for n in with_others}) == choose(p, plain, others)


def test_a_layer_without_a_dense_way_is_named() -> None:
    with pytest.raises(KeyError, match="b"):
        choose(TrainingPass((Bucket(1, ("a", "b")),), {}, 1), {"a": dense(1)}, {})


@given(cases(), st.floats(0, 0.3))
def test_by_default_nothing_is_predicted_longer_than_dense_and_no_more_work_is_done(case: Case, margin: float) -> None:
    p, plain, others = case
    free, frugal = module.choose(p, plain, others, margin), choose(p, plain, others, margin)
    assert free.seconds <= free.dense_s
    assert frugal.seconds <= frugal.dense_s
    work = [sum(w.alone_s for w in c.ways.values()) for c in (free, frugal)]
    assert work[0] <= work[1] + 1e-9
    assert bool(changed(free.ways)) == bool(changed(frugal.ways))


def test_by_default_a_hidden_transfer_is_spared_the_link_if_another_change_is_worth_making() -> None:
    p = TrainingPass((Bucket(1, ("hidden",)), Bucket(10, ("last",))), {"hidden": 0, "last": 9}, 10)
    plain, others = {"hidden": dense(5), "last": dense(6)}, {"hidden": [other(1)], "last": [other(2)]}
    assert changed(module.choose(p, plain, others).ways) == {"hidden", "last"}
    assert changed(module.choose(p, {**plain, "last": dense(0.1)}, {"hidden": [other(1)]}).ways) == set()
