"""The cost code against the numbers of the papers."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.planning.cost import volume
from commlib.planning.cost.volume import FactorableShape

SHAPES = st.builds(
    FactorableShape,
    m=st.integers(1, 5000),
    n=st.integers(1, 5000),
    rows=st.integers(0, 5000),
    workers=st.integers(1, 64),
    servers=st.integers(1, 64),
)


def test_the_oracles_of_a_square_layer_on_eight_machines() -> None:
    s = FactorableShape(4096, 4096, rows=32, workers=8, servers=8)
    assert volume.ps_worker(s) == 33_554_432
    assert volume.ps_server(s) == 33_554_432
    assert volume.ps_colocated(s) == 58_720_256
    assert volume.factors(s) == 3_670_016
    assert volume.adam_colocated(s) == 119_275_520
    assert volume.adam_server(s) == 136_314_880
    assert volume.best_scheme(s) == "factors"


@pytest.mark.parametrize(
    ("m", "n", "workers", "rows"),
    [(4096, 4096, 8, 512), (4096, 4096, 16, 256), (4096, 4096, 32, 128), (25088, 4096, 8, 880), (4096, 1000, 8, 201)],
)
def test_the_crossovers_of_known_layers(m: int, n: int, workers: int, rows: int) -> None:
    k = volume.crossover_rows(m, n, workers, workers)
    assert math.floor(k + 0.5) == rows
    assert k == pytest.approx(2 * m * n / (workers * (m + n)))


@given(SHAPES)
def test_the_crossover_is_where_the_choice_turns(s: FactorableShape) -> None:
    k = volume.crossover_rows(s.m, s.n, s.workers, s.servers)
    if s.workers == 1:
        assert k == math.inf
        return
    assert volume.best_scheme(s) == ("factors" if s.rows <= k * (1 + 1e-12) else "matrix")


@given(SHAPES)
def test_servers_on_the_workers_machines_move_what_a_ring_does(s: FactorableShape) -> None:
    p = s.workers
    ring = 2 * 2 * (p - 1) / p * s.matrix  # sent and received
    assert volume.ps_colocated(dataclasses.replace(s, servers=p)) == pytest.approx(ring)


@given(SHAPES)
def test_balanced_blocks_cost_a_worker_what_adams_do_with_one_server_and_more_with_more(s: FactorableShape) -> None:
    one = dataclasses.replace(s, servers=1)
    assert volume.blocks_worker(one) == volume.adam_worker(one)
    assert volume.blocks_worker(s) >= volume.adam_worker(s)


def test_the_oracle_of_blocks_on_four_machines() -> None:
    tall = FactorableShape(m=4096, n=20_480, rows=32, workers=4, servers=4)
    assert volume.blocks_colocated(tall) == 2 * 3 * (32 * (4096 + 5120) + 4096 * 5120) == 127_598_592
    assert volume.blocks_colocated(dataclasses.replace(tall, m=20_480, n=4096)) == 127_598_592
    with pytest.raises(ValueError, match="4 workers are as many servers; got 2"):
        volume.blocks_colocated(dataclasses.replace(tall, servers=2))


@given(SHAPES, st.integers(1, 64))
def test_blocks_balance_what_adams_owner_moves_and_beat_a_ring_up_to_their_crossover(
    s: FactorableShape, p: int
) -> None:
    s = dataclasses.replace(s, workers=p, servers=p)
    moved, small, large = volume.blocks_colocated(s), min(s.m, s.n), max(s.m, s.n)
    # Adam's owner gets all rows and sends the matrix; with blocks all machines together move no less than it does.
    assert p * moved >= 2 * volume.adam_colocated(s) * (1 - 1e-12)
    even = s.matrix / (p * small + large)
    if p > 1 and abs(s.rows - even) > 1e-9 * even:
        assert (moved < volume.ps_colocated(s)) == (s.rows < even)


@given(SHAPES.filter(lambda s: s.workers >= 3 and s.rows > 0))
def test_sacp_chooses_by_the_share_of_factors_in_the_matrix(s: FactorableShape) -> None:
    share = s.factors / s.matrix
    expected = "factors" if share <= 1 / (s.workers - 2) else "hybrid" if share < 1 else "matrix"
    totals = {
        "factors": (s.workers - 1) * s.factors,
        "hybrid": s.factors + s.matrix,
        "matrix": 2 * s.matrix,
    }
    chosen = volume.sacp_scheme(s)
    assert totals[chosen] == min(totals.values())
    assert chosen == expected or totals[chosen] == totals[expected]


@pytest.mark.parametrize("bad", [{"m": 0}, {"n": -1}, {"rows": -1}, {"workers": 0}, {"servers": 0}])
def test_what_is_no_cluster_is_refused(bad: dict[str, int]) -> None:
    good = {"m": 2, "n": 2, "rows": 1, "workers": 2, "servers": 2}
    with pytest.raises(ValueError, match=next(iter(bad))):
        FactorableShape(**{**good, **bad})


def test_a_worker_sends_its_gradient_once_and_the_busiest_shard_its_share_of_all_workers() -> None:
    nbytes, matrix = 4 * 4096 * 4096, FactorableShape(4096, 4096, rows=0, workers=8, servers=8)
    assert volume.push_pull_worker(nbytes) == 4 * volume.ps_worker(matrix) / 2  # one way
    for servers in (1, 3, 8):
        one = dataclasses.replace(matrix, servers=servers)
        assert volume.push_pull_shard(nbytes, 8, servers) == pytest.approx(4 * volume.ps_server(one) / 2)


@given(st.integers(3, 64), st.integers(1, 200))
def test_dedicated_servers_win_from_half_as_many_as_workers_on_and_at_most_nearly_twice(p: int, servers: int) -> None:
    gain = volume.push_pull_gain(p, servers)
    assert (gain > 1) == (servers * 2 * (p - 1) > p * p)
    assert gain <= 2 * (p - 1) / p < 2
    assert volume.push_pull_gain(p, p) == pytest.approx(2 * (p - 1) / p)  # more servers than workers help no further
    assert volume.push_pull_gain(p, 2 * p) == volume.push_pull_gain(p, p)
    assert volume.push_pull_gain(2, servers) <= 1  # two ranks exchange no more than that between themselves
