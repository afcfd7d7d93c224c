"""The link as two lines: a ring by hand, and what is no link."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.messaging.link_model import AlphaBeta, Link

FREE = AlphaBeta(0, 0)
LINES = st.builds(AlphaBeta, alpha=st.floats(0, 1), beta=st.floats(0, 1e-6))
LINKS = st.builds(Link, world=st.integers(1, 64), all_reduce=LINES, all_gather=LINES, drag=st.floats(1, 8))
BYTES = st.floats(0, 1e9)


@pytest.mark.parametrize(
    ("world", "gbit_s", "latency_s", "sent", "reduced", "gathered"),
    [
        (4, 10, 50e-6, 125_000_000, 0.1003, 0.10015),  # 6 and 3 messages of 50 µs, 1 Gbit at 10 Gbit/s
        (2, 1, 1e-3, 0, 0.002, 0.001),
        (8, 0.1, 0, 12_500_000, 1.0, 1.0),
        (1, 1, 1e-3, 0, 0.0, 0.0),  # alone: no messages
    ],
)
def test_a_ring_takes_the_seconds_computed_by_hand(
    world: int, gbit_s: float, latency_s: float, sent: int, reduced: float, gathered: float
) -> None:
    ring = Link.ring(world, gbit_s, latency_s)
    assert ring.world == world
    assert ring.all_reduce.seconds(sent) == pytest.approx(reduced)
    assert ring.all_gather.seconds(sent) == pytest.approx(gathered)


@given(st.floats(0, 1), st.floats(0, 1e-6), BYTES, BYTES)
def test_seconds_are_a_line_through_alpha(alpha: float, beta: float, some: float, more: float) -> None:
    line = AlphaBeta(alpha, beta)
    assert line.seconds(0) == alpha
    assert line.seconds(some + more) - line.seconds(some) == pytest.approx(beta * more, rel=1e-6, abs=1e-9)


@given(LINKS, st.floats(0, 100), BYTES)
def test_slower_by_a_factor_takes_every_time_so_many_times_as_long(link: Link, factor: float, sent: float) -> None:
    slow = link.slower(factor)
    assert slow.world == link.world
    assert slow.all_reduce.seconds(sent) == pytest.approx(factor * link.all_reduce.seconds(sent), rel=1e-9)
    assert slow.all_gather.seconds(sent) == pytest.approx(factor * link.all_gather.seconds(sent), rel=1e-9)


def test_slower_leaves_the_link_that_it_is_asked_of_alone() -> None:
    link = Link(2, AlphaBeta(1, 2), AlphaBeta(3, 4))
    assert link.slower(0.5) == Link(2, AlphaBeta(0.5, 1), AlphaBeta(1.5, 2))
    assert link == Link(2, AlphaBeta(1, 2), AlphaBeta(3, 4))


def test_the_way_to_servers_is_as_much_slower_and_may_have_the_least_beta() -> None:
    link = Link(2, AlphaBeta(1, 2), AlphaBeta(3, 4), push_pull=AlphaBeta(5, 1))
    assert link.slower(2) == Link(2, AlphaBeta(2, 4), AlphaBeta(6, 8), push_pull=AlphaBeta(10, 2))
    assert (link.least_beta, Link(2, AlphaBeta(1, 2), AlphaBeta(3, 4)).least_beta) == (1, 2)


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf, -math.inf])
def test_a_line_that_cannot_be_is_refused_by_name(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"{name} of a link must be a number ≥ 0, got {bad!r}"):
        AlphaBeta(**{"alpha": 0.0, "beta": 0.0, name: bad})


BAD: dict[str, tuple[Callable[[], Link], str]] = {
    "no rank": (lambda: Link(0, FREE, FREE), "at least 1, got 0"),
    "fewer than none": (lambda: Link(-2, FREE, FREE), "at least 1, got -2"),
    "a ring of no rank": (lambda: Link.ring(0, 1, 0), "at least 1, got 0"),
    "0 Gbit/s": (lambda: Link.ring(2, 0, 0), "more than 0 Gbit/s, got 0"),
    "negative Gbit/s": (lambda: Link.ring(2, -1, 0), "more than 0 Gbit/s, got -1"),
    "inf Gbit/s": (lambda: Link.ring(2, math.inf, 0), "more than 0 Gbit/s, got inf"),
    "nan Gbit/s": (lambda: Link.ring(2, math.nan, 0), "more than 0 Gbit/s, got nan"),
    "negative latency": (lambda: Link.ring(2, 1, -1e-6), "latency of a link must be .* got -1e-06"),
    "nan latency": (lambda: Link.ring(2, 1, math.nan), "latency of a link must be .* got nan"),
    "inf latency": (lambda: Link.ring(2, 1, math.inf), "latency of a link must be .* got inf"),
    "arithmetic faster beside it": (lambda: Link(2, FREE, FREE, 0.9), "got a drag of 0.9"),
    "a drag of nan": (lambda: Link(2, FREE, FREE, math.nan), "got a drag of nan"),
    "a drag of inf": (lambda: Link(2, FREE, FREE, math.inf), "got a drag of inf"),
    "slower by a negative factor": (lambda: Link.ring(2, 1, 1e-6).slower(-1), "of a link must be a number ≥ 0"),
    "slower by nan": (lambda: Link.ring(2, 1, 1e-6).slower(math.nan), "of a link must be a number ≥ 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_link_is_refused(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()
