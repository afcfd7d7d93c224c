"""When a step of given ways ends: the recursion of :mod:`commlib.timeline`, its bounds, and small steps by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib import timeline
from commlib.overlap import Bucket, Pass, exposed, finish
from commlib.price import Way

SOME = st.floats(0, 10)
TIMES = st.lists(st.tuples(SOME, SOME), min_size=1, max_size=8)
Case = tuple[Pass, dict[str, Way]]


def way(link_s: float = 0.0, route: str = "dense", shared_s: float = 0.0, **more: float) -> Way:
    return Way(route, 0, link_s, shared_s, early=route == "factors", **more)


def one_by_one(ready: Sequence[float], end: float | None = None, **rows: float) -> Pass:
    """Layers a, b, c …, each in a bucket of its own."""
    buckets = tuple(Bucket(t, (name,)) for t, name in zip(ready, "abcdefgh", strict=False))
    return Pass(buckets, rows, max(ready) if end is None else end, spare_cores=True)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any pass, each layer by a way with any costs."""
    ways: dict[str, Way] = {}
    rows: dict[str, float] = {}
    buckets, now = [], 0.0
    for size in draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)):
        names = tuple(f"layer {len(ways) + i}" for i in range(size))
        for name in names:
            now += draw(SOME)
            rows[name] = now
            route = draw(st.sampled_from(["dense", "factors", "topk"]))
            before, after, saved = (draw(SOME) if route != "dense" else 0.0 for _ in range(3))
            shared = {"dense": 1.0, "factors": 2.0, "topk": 3.0}[route]
            ways[name] = way(draw(SOME), route, shared, before_s=before, after_s=after, saved_s=saved)
        now += draw(SOME)
        buckets.append(Bucket(now, names))
    return Pass(tuple(buckets), rows, now + draw(SOME), draw(st.booleans())), ways


def shared(p: Pass, ways: Mapping[str, Way]) -> float:
    """Seconds of all collectives that layers of a bucket share."""
    return sum(s for b in p.buckets for _, s in {(ways[n].route, ways[n].shared_s) for n in b.layers})


@given(TIMES)
def test_one_dense_layer_a_bucket_without_latency_is_the_timeline(times: list[tuple[float, float]]) -> None:
    backward, wire = zip(*times, strict=True)
    ready = itertools.accumulate(reversed(backward))
    p = one_by_one(list(ready))
    ways = {b.layers[0]: way(c) for b, c in zip(p.buckets, reversed(wire), strict=True)}
    line = timeline.overlap(backward, wire)
    assert finish(p, ways) == pytest.approx(line.seconds)
    assert exposed(p, ways) == pytest.approx(line.exposed)


def test_the_golden_step_takes_ten() -> None:
    p = one_by_one([4, 5, 6])  # a forward pass of 3, three layers of 1 each
    ways = {"a": way(4), "b": way(1), "c": way(1)}
    assert finish(p, ways) == 10
    assert exposed(p, ways) == 4


@given(cases())
def test_a_step_is_no_shorter_than_its_pass_less_what_is_saved_and_no_longer_than_all_in_turn(case: Case) -> None:
    p, ways = case
    saved = sum(w.saved_s for w in ways.values())
    costs = sum(w.link_s + w.before_s + w.after_s for w in ways.values()) + shared(p, ways)
    end = finish(p, ways)
    assert end >= p.end - saved - 1e-9
    assert end <= p.end + costs + 1e-9
    assert end >= sum(w.link_s for w in ways.values()) + shared(p, ways) - 1e-9  # one link


@given(cases(), st.data())
def test_a_longer_transfer_never_ends_a_step_sooner(case: Case, data: st.DataObject) -> None:
    p, ways = case
    name, more = data.draw(st.sampled_from(sorted(ways))), data.draw(SOME)
    longer = {**ways, name: dataclasses.replace(ways[name], link_s=ways[name].link_s + more)}
    assert finish(p, ways) - 1e-9 <= finish(p, longer) <= finish(p, ways) + more + 1e-9


def test_early_rows_leave_before_their_bucket() -> None:
    p = one_by_one([10], a=2)
    assert finish(p, {"a": way(5)}) == 15
    assert finish(p, {"a": way(5, "factors")}) == 10  # from 2 to 7
    assert finish(p, {"a": way(5, "factors", shared_s=1)}) == 11  # the flags go with the bucket
    assert finish(p, {"a": way(9, "factors")}) == 11
    assert finish(p, {"a": dataclasses.replace(way(9, "factors"), late_s=4)}) == 10 + 4  # what leaves with the bucket


def test_early_rows_that_find_the_link_busy_wait() -> None:
    p = one_by_one([1, 10], b=2)
    assert finish(p, {"a": way(6), "b": way(5, "factors")}) == 12  # a from 1 to 7, b from 7 to 12


def test_saved_seconds_shift_later_layers_only() -> None:
    p = one_by_one([4, 8], b=6)
    later = {"a": way(), "b": way(3, "topk")}
    assert finish(p, later) == 11
    assert finish(p, {**later, "b": way(3, "topk", saved_s=1)}) == 10
    earlier = {"a": way(10), "b": way()}  # from 4 to 14, whatever is saved at 6
    assert finish(p, {**earlier, "b": way(0, "topk", saved_s=1)}) == finish(p, earlier) == 14


def test_what_is_saved_moves_the_rows_of_later_layers_too() -> None:
    p = one_by_one([20], a=4, b=8)
    p = dataclasses.replace(p, buckets=(Bucket(20, ("a", "b")),))
    assert finish(p, {"a": way(0, "factors", saved_s=3), "b": way(30, "factors")}) == 8 - 3 + 30


def test_savings_do_not_make_anything_ready_before_the_step_begins() -> None:
    assert finish(one_by_one([10], a=1), {"a": way(3, "topk", saved_s=50, before_s=5)}) == 0 + 5 + 3


def test_compression_delays_its_bucket_and_the_later_ones() -> None:
    p = one_by_one([4, 8])
    plain = {"a": way(), "b": way(3)}
    assert finish(p, plain) == 11
    assert finish(p, {**plain, "a": way(0, "topk", before_s=2)}) == 13
    assert finish(p, {**plain, "b": way(3, "topk", before_s=2)}) == 13
    first = {"a": way(20), "b": way()}  # what comes later does not delay it
    assert finish(p, {**first, "b": way(0, "topk", before_s=2)}) == finish(p, first) == 24


def test_products_wait_for_their_transfer_and_for_each_other() -> None:
    p = one_by_one([4, 8])
    assert finish(p, {"a": way(1, "topk", after_s=7), "b": way(1, "topk", after_s=7)}) == 19  # 5 to 12, to 19
    busy = dataclasses.replace(p, end=20, spare_cores=False)
    assert finish(busy, {"a": way(1), "b": way(1, "topk", after_s=3)}) == 23  # they take the cores
    assert finish(dataclasses.replace(busy, spare_cores=True), {"a": way(1), "b": way(1, "topk", after_s=3)}) == 20


def test_layers_of_a_bucket_share_a_collective_with_their_route_only() -> None:
    p = Pass((Bucket(1, ("a", "b", "c")),), {}, 1, spare_cores=True)
    ways = {"a": way(1, shared_s=4), "b": way(1, shared_s=4), "c": way(1, shared_s=4)}
    assert finish(p, ways) == 1 + 3 + 4
    assert finish(p, {**ways, "c": way(1, "topk", shared_s=5)}) == 1 + 3 + 4 + 5


def test_a_pass_without_buckets_ends_with_itself() -> None:
    assert finish(Pass((), {}, 3), {}) == 3


@pytest.mark.parametrize(
    "ways",
    [{"a": way()}, {"a": way(), "b": way(1, "factors")}, {"a": way(), "b": way(1, "topk", saved_s=1)}],
    ids=["no way", "early rows at an unknown time", "savings at an unknown time"],
)
def test_a_layer_of_which_too_little_is_known_is_named(ways: dict[str, Way]) -> None:
    with pytest.raises(KeyError, match="b"):
        finish(one_by_one([4, 8], a=2), ways)
