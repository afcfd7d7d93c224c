"""When a step of given ways ends: the recursion of :mod:`commlib.planning.cost.overlap`, its bounds, and small steps
by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from commlib.planning.cost import overlap
from commlib.planning.cost.overlap import Bucket, TrainingPass, exposed, finish, undisturbed
from commlib.planning.cost.route_cost import Candidate
from tests.support.tiers import examples

SOME = st.floats(0, 10)
TIMES = st.lists(st.tuples(SOME, SOME), min_size=1, max_size=8)
Case = tuple[TrainingPass, dict[str, Candidate]]


def way(link_s: float = 0.0, route: str = "dense", shared_s: float = 0.0, **more: float) -> Candidate:
    return Candidate(route, 0, link_s, shared_s, early=route == "factors", **more)


def one_by_one(ready: Sequence[float], end: float | None = None, **rows: float) -> TrainingPass:
    """Layers a, b, c …, each in a bucket of its own."""
    buckets = tuple(Bucket(t, (name,)) for t, name in zip(ready, "abcdefgh", strict=False))
    return TrainingPass(buckets, rows, max(ready) if end is None else end, spare_cores=True)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any pass, each layer by a way with any costs."""
    ways: dict[str, Candidate] = {}
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
    drag = draw(st.sampled_from([1.0, 1.5, 4.0]))
    return TrainingPass(tuple(buckets), rows, now + draw(SOME), draw(st.booleans()), drag), ways


def shared(p: TrainingPass, ways: Mapping[str, Candidate]) -> float:
    """Seconds of all collectives that layers of a bucket share."""
    return sum(s for b in p.buckets for _, s in {(ways[n].route, ways[n].shared_s) for n in b.layers})


@given(TIMES)
def test_one_dense_layer_a_bucket_without_latency_is_the_timeline(times: list[tuple[float, float]]) -> None:
    backward, wire = zip(*times, strict=True)
    ready = itertools.accumulate(reversed(backward))
    p = one_by_one(list(ready))
    ways = {b.layers[0]: way(c) for b, c in zip(p.buckets, reversed(wire), strict=True)}
    line = overlap.overlap(backward, wire)
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
    assert end <= p.drag * (p.end + costs) + 1e-9
    assert end <= p.end + p.drag * costs + 1e-9  # only while the link is in use is it slower
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


def test_savings_do_not_make_anything_ready_before_its_rows_are_there() -> None:
    assert finish(one_by_one([10], a=1), {"a": way(3, "topk", saved_s=50, before_s=5)}) == 1 + 5 + 3


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
    p = TrainingPass((Bucket(1, ("a", "b", "c")),), {}, 1, spare_cores=True)
    ways = {"a": way(1, shared_s=4), "b": way(1, shared_s=4), "c": way(1, shared_s=4)}
    assert finish(p, ways) == 1 + 3 + 4
    assert finish(p, {**ways, "c": way(1, "topk", shared_s=5)}) == 1 + 3 + 4 + 5


def test_while_the_link_is_in_use_the_pass_is_slower() -> None:
    p = dataclasses.replace(one_by_one([2, 5, 9]), drag=3)
    nothing = dict.fromkeys("abc", way())
    assert finish(p, nothing) == 9
    assert finish(p, {**nothing, "a": way(3)}) == 11  # 1 of the 7 seconds left takes 3
    assert finish(p, {**nothing, "a": way(30)}) == 2 + 30  # all of them take 21
    assert finish(p, {**nothing, "a": way(3, "topk", before_s=4)}) == 15  # what comes before it is not held up
    assert finish(p, {**nothing, "a": way(6), "b": way(0, "topk", before_s=1)}) == 2 + 6 + (8 - 2)  # that is, too
    less = {**nothing, "a": way(4), "b": way(0, "topk", saved_s=6)}
    assert finish(dataclasses.replace(p, rows={"b": 2}), less) == 2 + 4  # in 4 seconds more than the 1 left is done


class Seen:
    """A step in short ticks: the pass as it is then, by another way than the product's."""

    TICK = 1 / 64

    def __init__(self, p: TrainingPass, ways: Mapping[str, Candidate]) -> None:
        self.clock = then = free = 0.0
        rows, ready = dict(p.rows), [b.ready for b in p.buckets]
        layers = [(p.rows[n], 0, i, n) for i, b in enumerate(p.buckets) for n in b.layers]
        left = sorted([*layers, *((b.ready, 1, i, "") for i, b in enumerate(p.buckets))])
        compress, waiting, saved = 0.0, 0.0, 0.0
        while left or compress > 0 or then < p.end:
            if compress > 0:
                compress -= self._tick(free, p.drag)
                continue
            free, waiting = (max(free, self.clock) + waiting, 0.0) if waiting else (free, 0.0)
            if left and then >= left[0][0] - 1e-9:
                _, whole, i, name = left.pop(0)
                own = [ways[n] for n in p.buckets[i].layers]
                if whole:
                    ready[i], compress = self.clock, sum(w.before_s for w in own)
                    waiting = sum(w.late_s if w.early else w.link_s for w in own)
                    waiting += sum({w.route: w.shared_s for w in own}.values())
                else:
                    rows[name], saved = self.clock, saved + ways[name].saved_s
                    waiting = ways[name].link_s - ways[name].late_s if ways[name].early else 0.0
                continue
            skipped = min(saved, (left[0][0] if left else p.end) - then)
            saved, then = saved - skipped, then + skipped
            if not skipped and then < p.end:
                then += self._tick(free, p.drag)
        buckets = tuple(dataclasses.replace(b, ready=t) for b, t in zip(p.buckets, ready, strict=True))
        self.seen = TrainingPass(buckets, rows, self.clock, p.spare_cores)

    def _tick(self, free: float, drag: float) -> float:
        busy = self.clock < free - 1e-9
        self.clock += self.TICK
        return self.TICK / drag if busy else self.TICK


def times(p: TrainingPass) -> list[float]:
    return [*(b.ready for b in p.buckets), *(t for _, t in sorted(p.rows.items())), p.end]


@given(cases())
@settings(max_examples=examples(50))
def test_a_pass_is_found_again_from_what_was_seen_of_it(case: Case) -> None:
    p, ways = case
    points = sorted(times(p))
    # or nobody could see which is first
    assume(all(b == a or b - a > Seen.TICK for a, b in itertools.pairwise(points)))
    for name, t in p.rows.items():  # what is saved lies between the rows and whatever comes next
        room = sorted(u - t for u in points if u >= t)[1]
        ways[name] = dataclasses.replace(ways[name], saved_s=min(ways[name].saved_s, room / 2))
    seen = Seen(p, ways)
    tolerance = 2 * p.drag * Seen.TICK * (len(points) + 1)
    found = undisturbed(seen.seen, ways, p.drag)
    assert times(found) == pytest.approx(times(p), abs=tolerance)
    assert found.drag == p.drag
    free = {n: dataclasses.replace(w, after_s=0.0) for n, w in ways.items()}
    assert finish(p, free) >= seen.clock - tolerance
    assert finish(p, dict.fromkeys(ways, way())) == pytest.approx(p.end)


def test_what_was_saved_or_compressed_is_put_right_and_of_an_unseen_layer_nothing_is_known() -> None:
    seen = TrainingPass((Bucket(4, ("a",)), Bucket(8, ("b", "c"))), {"a": 1}, 10)
    plain = {"a": way(2, "factors", saved_s=1), "b": way(3, "topk", before_s=2)}
    p = undisturbed(seen, plain, 1.0)
    assert (p.rows, [b.ready for b in p.buckets], p.end) == ({"a": 1}, [5, 9], 9)  # from 8 to 10 it compressed
    assert undisturbed(seen, {}, 3.0) == dataclasses.replace(seen, drag=3.0)
    early = {"c": way(2, "factors", saved_s=5)}  # nobody saw when its rows were there
    assert undisturbed(seen, early, 1.0) == seen
    dragged = undisturbed(seen, {"a": way(2, "factors")}, 2.0)  # from 1 to 3 half of it is done
    assert ([b.ready for b in dragged.buckets], dragged.end) == ([3, 7], 9)


def test_a_pass_without_buckets_ends_with_itself() -> None:
    assert finish(TrainingPass((), {}, 3), {}) == 3


@pytest.mark.parametrize(
    "ways",
    [{"a": way()}, {"a": way(), "b": way(1, "factors")}, {"a": way(), "b": way(1, "topk", saved_s=1)}],
    ids=["no way", "early rows at an unknown time", "savings at an unknown time"],
)
def test_a_layer_of_which_too_little_is_known_is_named(ways: dict[str, Candidate]) -> None:
    with pytest.raises(KeyError, match="b"):
        finish(one_by_one([4, 8], a=2), ways)
