"""What a rank notes down, told by a clock that stands still, and what is made of all ranks' notes."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.messaging.link_model import AlphaBeta, Link
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.measurements import MeasuredStep, Measurements, StepMeasurements, slowest
from commlib.runtime.streams import Moment

LINK = Link(3, AlphaBeta(0.5, 1e-8), AlphaBeta(0.25, 2e-8))
SERVED = dataclasses.replace(LINK, push_pull=AlphaBeta(0.125, 3e-8))
NUMBERS = st.floats(0, 1e3)
NAMES = st.text(max_size=4)
LINES = st.builds(AlphaBeta, NUMBERS, NUMBERS)
LINKS = st.builds(Link, st.integers(1, 8), LINES, LINES, st.floats(1, 8))
FIGURES = st.lists(st.tuples(NUMBERS, st.lists(NAMES, max_size=3).map(tuple)), max_size=3).flatmap(
    lambda buckets: st.builds(
        Measurements,
        steps=st.integers(0, 9),
        span=NUMBERS,
        rest=NUMBERS,
        ready=st.just(tuple(t for t, _ in buckets)),
        buckets=st.just(tuple(names for _, names in buckets)),
        end=NUMBERS,
        seen=st.dictionaries(NAMES, NUMBERS, max_size=3),
        rows=st.dictionaries(NAMES, st.integers(0, 1 << 40), max_size=3),
        wire=NUMBERS,
        probe_s=NUMBERS,
        products=st.dictionaries(NAMES, st.tuples(NUMBERS, NUMBERS), max_size=3),
        link=st.none() | LINKS,
        arithmetic=st.text(max_size=8),
    )
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> Moment:
        return Moment(self.now)


def figures(**changes: object) -> Measurements:
    """Of one rank with two buckets."""
    plain: dict[str, object] = {"steps": 4, "span": 5.0, "rest": 1.0, "ready": (2.0, 3.0), "buckets": (("b",), ("a",))}
    return Measurements(**{**plain, "end": 4.0, "seen": {"fc": 2.5}, "rows": {"fc": 8}, "arithmetic": "avx", **changes})  # type: ignore[arg-type]


def step(span: float, *buckets: tuple[float, tuple[str, ...]], **more: dict[str, float]) -> MeasuredStep:
    return MeasuredStep(list(buckets), end=span / 2, span=span, rest=span / 10, **more)  # type: ignore[arg-type]


def test_a_step_is_noted_from_its_first_forward_pass_to_the_end_of_its_exchange() -> None:
    clock = Clock()
    sheet = StepMeasurements(clock)
    script = [
        *(sheet.begin, sheet.begin),  # a second forward pass, of the same step
        *(lambda: sheet.rows("fc", 3), lambda: sheet.rows("fc", 4)),
        *(lambda: sheet.bucket(("b", "c")), lambda: sheet.bucket(("a",))),
        *(sheet.backward_ended, sheet.end),
    ]
    for begin in (100.0, 112.0):
        for later, happens in enumerate(script):
            clock.now = begin + later
            happens()
    first, second = sheet.take()
    buckets = [(4.0, ("b", "c")), (5.0, ("a",))]
    assert first == MeasuredStep(buckets, seen={"fc": 3}, rows={"fc": 7}, end=6, span=7, rest=0)
    assert second == dataclasses.replace(first, rest=5)  # from 107 to 112


def test_what_was_taken_is_not_there_any_more() -> None:
    sheet = StepMeasurements(Clock())
    sheet.begin()
    sheet.end()
    assert len(sheet.take()) == 1
    assert sheet.take() == []


def test_a_step_without_a_forward_pass_is_not_counted_but_ends_the_one_before() -> None:
    clock = Clock()
    sheet = StepMeasurements(clock)
    sheet.bucket(("a",))  # a rank that joins for others has no pass of its own
    sheet.backward_ended()
    clock.now = 105.0
    sheet.end()
    assert sheet.take() == []
    clock.now = 107.0
    sheet.begin()
    sheet.bucket(("b",))
    sheet.end()
    (only,) = sheet.take()
    assert only == MeasuredStep([(0.0, ("b",))], rest=2.0)


def test_figures_are_medians_and_the_most_rows() -> None:
    names = ("b",), ("a",)
    steps = [
        step(span, (span / 4, names[0]), (span / 3, names[1]), seen={"fc": span / 5}, rows={"fc": rows})
        for span, rows in ((10.0, 5), (90.0, 9), (20.0, 1))
    ]
    f = Measurements.of(steps, wire=0.5, arithmetic="avx", link=LINK)
    assert (f.steps, f.span, f.rest, f.end) == (3, 20, 2, 10)
    assert f.ready == pytest.approx((5, 20 / 3))
    assert f.buckets == names
    assert (f.seen, f.rows) == ({"fc": 4}, {"fc": 9})
    assert (f.wire, f.arithmetic, f.link) == (0.5, "avx", LINK)


def test_steps_with_other_buckets_than_the_last_one_s_count_for_their_rows_only() -> None:
    old = step(90.0, (80.0, ("a", "b")), seen={"fc": 70.0}, rows={"fc": 9})
    new = [step(t, (1.0, ("b",)), (2.0, ("a",)), seen={"fc": t / 4}, rows={"fc": 5}) for t in (10.0, 12.0)]
    f = Measurements.of([new[0], old, new[1]])
    assert (f.steps, f.span, f.ready, f.buckets) == (2, 11, (1, 2), (("b",), ("a",)))
    assert (f.seen, f.rows) == ({"fc": 2.75}, {"fc": 9})


def test_a_layer_that_some_steps_do_not_use_has_the_median_of_those_that_do() -> None:
    steps = [step(10.0, seen={"fc": 3.0}, rows={"fc": 2}), step(10.0), step(10.0, seen={"fc": 5.0}, rows={"fc": 4})]
    f = Measurements.of(steps)
    assert (f.steps, f.seen, f.rows) == (3, {"fc": 4}, {"fc": 4})


def test_no_steps_are_figures_too() -> None:
    f = Measurements.of([], arithmetic="avx", products={"fc": (1.0, 2.0)})
    assert (f.steps, f.span, f.buckets, f.arithmetic) == (0, 0, (), "avx")
    assert f.products == {"fc": (1.0, 2.0)}


@given(FIGURES)
def test_figures_come_through_the_store_as_they_were(f: Measurements) -> None:
    assert Measurements.from_wire(msgpack.unpackb(msgpack.packb(f.to_wire()))) == f


@given(
    st.builds(
        Decision,
        routes=st.dictionaries(NAMES, NAMES),
        rows=st.dictionaries(NAMES, st.integers(0, 1 << 40)),
        steps=st.integers(1, 1 << 62),
        predicted=st.dictionaries(NAMES, NUMBERS),
        step_s=st.none() | st.tuples(NUMBERS, NUMBERS),
        said=st.text(max_size=8),
    )
)
def test_a_decision_comes_through_the_store_as_it_was_its_routes_in_order(decision: Decision) -> None:
    there = Decision.from_wire(msgpack.unpackb(msgpack.packb(decision.to_wire())))
    assert there == decision
    assert list(there.routes) == list(decision.routes)


def test_the_slowest_rank_has_the_most_of_everything() -> None:
    other = Link(3, AlphaBeta(0.1, 5e-8), AlphaBeta(0.9, 1e-8), drag=2.0)
    a = figures(wire=0.3, link=LINK, probe_s=2.0, products={"fc": (1.0, 2.0)})
    b = figures(steps=3, span=6.0, rest=0.5, ready=(1.0, 3.5), end=4.5, link=other, probe_s=1.0)
    more = {"rows": {"fc": 9, "head": 2}, "products": {"fc": (2.0, 3.0), "head": (0.5, 0.5)}}
    b = dataclasses.replace(b, seen={"fc": 2.0, "head": 1.0}, **more)  # type: ignore[arg-type]
    most = dataclasses.replace(b, rest=1.0, ready=(2.0, 3.5), seen={"fc": 2.5, "head": 1.0}, wire=0.3, probe_s=2.0)
    most = dataclasses.replace(most, link=Link(3, AlphaBeta(0.5, 5e-8), AlphaBeta(0.9, 2e-8), drag=2.0))
    assert slowest([a, b]) == slowest([b, a]) == most


def test_the_way_to_servers_comes_through_the_store_and_is_the_slowest_ranks() -> None:
    a, b = figures(link=SERVED), figures(link=dataclasses.replace(SERVED, push_pull=AlphaBeta(0.25, 1e-8)))
    assert Measurements.from_wire(msgpack.unpackb(msgpack.packb(a.to_wire()))) == a
    assert slowest([a, b]).link == dataclasses.replace(SERVED, push_pull=AlphaBeta(0.25, 3e-8))


@given(FIGURES.filter(lambda f: f.steps > 0), st.integers(1, 4))
def test_ranks_that_are_all_alike_are_as_slow_as_one(f: Measurements, ranks: int) -> None:
    assert slowest([f] * ranks) == f


def test_ranks_without_steps_do_not_count_but_their_link_and_arithmetic_do() -> None:
    idle = Measurements.of([], arithmetic="avx", link=LINK, wire=9.0)
    assert slowest([idle, figures(), idle]) == dataclasses.replace(figures(), link=LINK)
    assert slowest([idle, idle]) == idle
    assert slowest([figures(), Measurements.of([], arithmetic="sve")]).arithmetic == ""


def test_unlike_arithmetic_is_none_at_all() -> None:
    assert slowest([figures(), figures()]).arithmetic == "avx"
    assert slowest([figures(), figures(arithmetic="sve")]).arithmetic == ""


def test_ranks_with_other_buckets_do_not_say_when_they_were_ready() -> None:
    a, b = figures(), figures(buckets=(("a", "b"),), ready=(9.0,), span=7.0)
    assert slowest([a, b]) == dataclasses.replace(a, span=7.0)
