"""The cost code against the numbers of the papers, and against numbers worked out by hand."""

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
    assert volume.ps_colocated(s) == 58_720_256
    assert volume.factors(s) == 3_670_016
    assert volume.adam_colocated(s) == 119_275_520


@pytest.mark.parametrize(
    ("m", "n", "workers", "rows"),
    [(4096, 4096, 8, 512), (4096, 4096, 16, 256), (4096, 4096, 32, 128), (25088, 4096, 8, 880), (4096, 1000, 8, 201)],
)
def test_the_crossovers_of_known_layers(m: int, n: int, workers: int, rows: int) -> None:
    k = volume.crossover_rows(m, n, workers, workers)
    assert math.floor(k + 0.5) == rows
    assert k == pytest.approx(2 * m * n / (workers * (m + n)))


@given(SHAPES)
def test_up_to_the_crossover_factors_are_no_more_values_than_the_matrix(s: FactorableShape) -> None:
    k = volume.crossover_rows(s.m, s.n, s.workers, s.servers)
    if s.workers == 1:
        assert k == math.inf
        return
    assert (volume.factors(s) <= volume.ps_colocated(s)) == (s.rows <= k * (1 + 1e-12))


@given(SHAPES)
def test_servers_on_the_workers_machines_move_what_a_ring_does(s: FactorableShape) -> None:
    p = s.workers
    ring = 2 * 2 * (p - 1) / p * s.matrix  # sent and received
    assert volume.ps_colocated(dataclasses.replace(s, servers=p)) == pytest.approx(ring)


@pytest.mark.parametrize("bad", [{"m": 0}, {"n": -1}, {"rows": -1}, {"workers": 0}, {"servers": 0}])
def test_what_is_no_cluster_is_refused(bad: dict[str, int]) -> None:
    good = {"m": 2, "n": 2, "rows": 1, "workers": 2, "servers": 2}
    with pytest.raises(ValueError, match=next(iter(bad))):
        FactorableShape(**{**good, **bad})


def test_a_worker_sends_its_gradient_once_and_the_busiest_shard_its_share_of_all_workers() -> None:
    nbytes, matrix = 4 * 4096 * 4096, FactorableShape(4096, 4096, rows=0, workers=8, servers=8)
    assert volume.push_pull_worker(nbytes) == 4 * matrix.matrix
    for servers in (1, 3, 8):
        assert volume.push_pull_shard(nbytes, 8, servers) == pytest.approx(4 * 8 * matrix.matrix / servers)


def test_a_placed_layer_by_hand() -> None:
    s = FactorableShape(m=9216, n=4096, rows=32, workers=4, servers=4)
    assert volume.placed_sent(s) == (884_736, 98_304, 98_304, 884_736)
    assert volume.placed(s, input_grad=False) == 2 * (884_736 + 2 * 98_304)
    assert volume.placed(s, input_grad=False) < volume.factors(s) < volume.ps_colocated(s)
    assert volume.factors(s) < volume.placed(s)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 500), st.integers(2, 64))
def test_it_moves_less_than_factors_where_the_rule_says_so(m: int, n: int, rows: int, workers: int) -> None:
    s = FactorableShape(m, n, rows, workers, workers)
    assert (volume.placed(s) < volume.factors(s)) == (workers * m < n * (workers - 2))
    assert (volume.placed(s, input_grad=False) < volume.factors(s)) == (workers > 2)
