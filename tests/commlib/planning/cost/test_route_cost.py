"""The price of a layer by each route, against the counts of :mod:`commlib.planning.cost.volume` and against what is
really sent."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.plan import published_costs
from commlib.exchange.factors.delivery import BroadcastDelivery, OwnerDelivery
from commlib.exchange.factors.payload import RowCapacity, RowPayload
from commlib.exchange.factors.rounds import FactorRounds, RowHistory
from commlib.groups.world import World
from commlib.messaging.link_model import AlphaBeta, Link
from commlib.planning.cost import route_cost, volume
from commlib.planning.cost.volume import FactorableShape

F32 = 4  # bytes
WORD = 16  # bytes in which a rank says how many rows it has
SHAPES = st.integers(2, 64).flatmap(
    lambda p: st.builds(
        FactorableShape,
        m=st.integers(1, 5000),
        n=st.integers(1, 5000),
        rows=st.integers(0, 5000),
        workers=st.just(p),
        servers=st.just(p),
    )
)
ODD = Link(4, AlphaBeta(0.5, 1e-8), AlphaBeta(0.125, 3e-8))


def dense(s: FactorableShape, link: Link) -> route_cost.Candidate:
    return route_cost.dense(s.matrix * F32, link)


def factors(s: FactorableShape, link: Link, local_s: float = 0.0, rebuild_s: float = 0.0) -> route_cost.Candidate:
    return route_cost.factors(s.n, s.m, s.rows, link, local_s=local_s, rebuild_s=rebuild_s)


def values(way: route_cost.Candidate, headers: int = 0) -> float:
    """Sent and received: a ring and an all-gather receive as much as they send."""
    return 2 * (way.sent - headers * WORD) / F32


def test_a_square_layer_on_eight_ranks_moves_the_values_of_the_papers() -> None:
    s, link = FactorableShape(4096, 4096, rows=32, workers=8, servers=8), Link.ring(8, 10, 0)
    assert values(dense(s, link)) == 58_720_256
    assert values(factors(s, link), headers=7) == 3_670_016


@given(SHAPES)
def test_any_layer_moves_what_the_cost_model_counts(s: FactorableShape) -> None:
    link = Link.ring(s.workers, 1, 0)
    assert values(dense(s, link)) == pytest.approx(volume.ps_colocated(s))
    assert values(factors(s, link), headers=s.workers - 1) == volume.factors(s)


@given(SHAPES)
def test_rows_are_cheaper_up_to_the_crossover_where_nothing_but_bytes_costs(s: FactorableShape) -> None:
    link = Link.ring(s.workers, 1, 0)
    header, one = (factors(FactorableShape(s.m, s.n, k, s.workers, s.servers), link).alone_s for k in (0, 1))
    even = dense(s, link).alone_s / (one - header)
    assert even == pytest.approx(volume.crossover_rows(s.m, s.n, s.workers, s.servers), rel=1e-6)
    if abs(s.rows - even) > 1e-6 * even:
        assert (factors(s, link).alone_s - header < dense(s, link).alone_s) == (s.rows < even)


@given(SHAPES, st.floats(0, 1), st.floats(0.01, 100))
def test_a_dense_exchange_takes_what_a_ring_does_by_the_textbook(
    s: FactorableShape, latency_s: float, gbit_s: float
) -> None:
    way = dense(s, Link.ring(s.workers, gbit_s, latency_s))
    rounds = 2 * (s.workers - 1)
    part = s.matrix * F32 / s.workers / (gbit_s * 1e9 / 8)
    assert way.link_s + way.shared_s == pytest.approx(rounds * (latency_s + part))
    assert (way.route, way.early, way.before_s, way.after_s, way.saved_s) == ("dense", False, 0, 0, 0)


@given(SHAPES.filter(lambda s: s.rows > 0))
def test_a_layer_s_rows_are_as_many_bytes_as_its_trip_sends_but_for_padding(s: FactorableShape) -> None:
    habit = RowHistory()
    habit.expect(s.rows)
    trip = FactorRounds(BroadcastDelivery(RowPayload(s.n, s.m), World(0, s.workers)), habit, torch.device("cpu"))
    padding = trip.wire_bytes() + (s.workers - 1) * WORD - factors(s, Link.ring(s.workers, 1, 0)).sent
    assert padding == (s.workers - 1) * (-s.factors * F32 % 8)  # the next rank's letter begins at a multiple of 8


@given(SHAPES, st.floats(0, 1), st.floats(0, 1))
def test_rows_pay_a_gather_and_a_product_and_save_the_local_one(
    s: FactorableShape, local_s: float, rebuild_s: float
) -> None:
    link = Link(s.workers, ODD.all_reduce, ODD.all_gather)
    way = factors(s, link, local_s, rebuild_s)
    assert way.link_s == link.all_gather.seconds(way.sent)
    assert way.shared_s == link.all_gather.alpha  # words of the ranks' rows
    assert way.alone_s == pytest.approx(way.link_s + rebuild_s - local_s)
    assert (way.route, way.early, way.before_s) == ("factors", True, 0)


@given(SHAPES, st.floats(0, 1))
def test_owners_pay_two_collectives_and_their_blocks_and_compute_what_they_save(
    s: FactorableShape, local_s: float
) -> None:
    link = Link(s.workers, ODD.all_reduce, ODD.all_gather)
    way = route_cost.owners(s.n, s.m, s.rows, link, local_s=local_s)
    assert way.link_s == pytest.approx(link.all_gather.seconds(way.sent))
    assert 0 < way.late_s < way.link_s
    assert way.shared_s == 2 * link.all_gather.alpha
    assert (way.after_s, way.saved_s, way.before_s) == (local_s, local_s, 0)
    assert (way.route, way.early) == ("owners", True)


@given(SHAPES, st.booleans())
def test_owners_are_the_bytes_that_the_cost_model_counts_and_never_fewer_than_are_sent(
    s: FactorableShape, whole: bool
) -> None:
    p = s.workers
    s = dataclasses.replace(s, m=s.m * p, n=s.n * p) if whole else s
    sent = sum(route_cost.owners_sent(s.n, s.m, s.rows, p)) - (p - 1) * WORD
    counted = published_costs.blocks_colocated(s) / 2 * F32
    assert sent == pytest.approx(counted) if whole else sent >= counted * (1 - 1e-12)
    padding = 7 * (p - 1)
    assert OwnerDelivery(s.n, s.m, World(p - 1, p)).busiest(RowCapacity(s.rows)) <= sent + padding


def test_rows_of_half_as_many_bytes_a_value_are_half_as_many_bytes() -> None:
    whole, half = (
        route_cost.factors(30, 20, 7, ODD, local_s=0, rebuild_s=0, itemsize=size).sent - 3 * WORD for size in (4, 2)
    )
    assert whole == 2 * half == 3 * 7 * 50 * 4


@pytest.mark.parametrize(
    ("gathers", "reduces", "shared", "beta"),
    [(1, 0, 0.125, 3e-8), (2, 0, 0.25, 3e-8), (0, 2, 1.0, 1e-8), (1, 1, 0.625, 3e-8)],
)
def test_a_payload_pays_its_bytes_and_its_bucket_the_collectives(
    gathers: int, reduces: int, shared: float, beta: float
) -> None:
    way = route_cost.compressed("topk", 1e6, ODD, gathers=gathers, reduces=reduces, before_s=0.01, after_s=0.02)
    assert (way.route, way.sent, way.early, way.saved_s) == ("topk", 1e6, False, 0)
    assert way.shared_s == pytest.approx(shared)
    assert way.link_s == pytest.approx(beta * 1e6)
    assert way.alone_s == pytest.approx(beta * 1e6 + 0.03)


def test_one_rank_alone_sends_nothing() -> None:
    link, s = Link.ring(1, 1, 1e-3), FactorableShape(300, 200, rows=5, workers=1, servers=1)
    for way in (dense(s, link), factors(s, link), route_cost.owners(s.n, s.m, s.rows, link, local_s=0)):
        assert (way.sent, way.link_s, way.shared_s) == (0, 0, 0)
    assert math.isinf(volume.crossover_rows(s.m, s.n, 1, 1))


def test_servers_cost_their_line_and_what_stays_dense_beside_them_its_own() -> None:
    served = dataclasses.replace(ODD, push_pull=AlphaBeta(0.25, 2e-8))
    assert route_cost.push_pull(1000, served) == route_cost.Candidate("push_pull", 1000, 2e-8 * 1000, 0.25)
    beside = route_cost.push_pull(1000, served, plain=100)
    assert beside.sent == 1000 + 150
    assert beside.link_s == pytest.approx(2e-8 * 1000 + 1e-8 * 150)
    assert beside.shared_s == 0.25 + 0.5
    with pytest.raises(ValueError, match="the way to the servers was not measured"):
        route_cost.push_pull(1000, ODD)
