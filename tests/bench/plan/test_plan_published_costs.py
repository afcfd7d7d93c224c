"""Costs of the papers, against their oracles and numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.bench.plan import published_costs
from commlib.planning.cost import volume
from commlib.planning.cost.volume import FactorableShape
from tests.commlib.planning.cost.test_volume import SHAPES


def test_the_oracle_of_blocks_on_four_machines() -> None:
    tall = FactorableShape(m=4096, n=20_480, rows=32, workers=4, servers=4)
    assert published_costs.blocks_colocated(tall) == 2 * 3 * (32 * (4096 + 5120) + 4096 * 5120) == 127_598_592
    assert published_costs.blocks_colocated(dataclasses.replace(tall, m=20_480, n=4096)) == 127_598_592
    with pytest.raises(ValueError, match="4 workers are as many servers; got 2"):
        published_costs.blocks_colocated(dataclasses.replace(tall, servers=2))


@given(SHAPES, st.integers(1, 64))
def test_blocks_balance_what_adams_owner_moves_and_beat_a_ring_up_to_their_crossover(
    s: FactorableShape, p: int
) -> None:
    s = dataclasses.replace(s, workers=p, servers=p)
    moved, small, large = published_costs.blocks_colocated(s), min(s.m, s.n), max(s.m, s.n)
    # Adam's owner gets all rows and sends the matrix; with blocks all machines together move no less than it does.
    assert p * moved >= 2 * volume.adam_colocated(s) * (1 - 1e-12)
    even = s.matrix / (p * small + large)
    if p > 1 and abs(s.rows - even) > 1e-9 * even:
        assert (moved < volume.ps_colocated(s)) == (s.rows < even)


@given(st.integers(3, 64), st.integers(1, 200))
def test_dedicated_servers_win_from_half_as_many_as_workers_on_and_at_most_nearly_twice(p: int, servers: int) -> None:
    gain = published_costs.push_pull_gain(p, servers)
    assert (gain > 1) == (servers * 2 * (p - 1) > p * p)
    assert gain <= 2 * (p - 1) / p < 2
    assert published_costs.push_pull_gain(p, p) == pytest.approx(
        2 * (p - 1) / p
    )  # more servers than workers help no further
    assert published_costs.push_pull_gain(p, 2 * p) == published_costs.push_pull_gain(p, p)
    assert published_costs.push_pull_gain(2, servers) <= 1  # two ranks exchange no more than that between themselves


def test_sparks_equations_by_hand() -> None:
    # 4 layers of 10, 6, 8, 3 neurons; 4 processes; 5 examples
    sizes = [10, 6, 8, 3]
    assert published_costs.spark_messages(4, 4, 5) == 5 * (3 + 2 * (4 * 2 + 2 * 3)) == 155
    assert published_costs.spark_ends(sizes, 4, 5) == 5 * 3 * (10 + 3 / 4) == 161.25
    assert published_costs.spark_forward(sizes, 4, 5) == 5 * 3 * (6 + 8) == 210
    assert published_costs.spark_backward(sizes, 4, 5) == 5 * 3 * ((8 + 6) + (3 + 8)) == 375
    assert published_costs.spark_values(sizes, 4, 5) == 161.25 + 210 + 375
    assert published_costs.spark_seconds(0.5, 0.25, 155, 746.25) == 77.5 + 186.5625


def test_one_process_has_nothing_to_send_and_without_hidden_layers_there_are_only_ends() -> None:
    assert published_costs.spark_values([10, 6, 3], 1, 5) == published_costs.spark_messages(3, 1, 5) == 0
    assert published_costs.spark_values([10, 3], 2, 1) == published_costs.spark_ends([10, 3], 2, 1) == 11.5


@pytest.mark.parametrize(("layers", "processes", "examples"), [(1, 2, 3), (3, 0, 3), (3, 2, -1)])
def test_networks_that_cannot_be_are_refused(layers: int, processes: int, examples: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        published_costs.spark_messages(layers, processes, examples)


OUTPUTS, PARAMETERS = [1000, 500, 100, 10], [50, 400, 9000, 1000]


def test_ralps_values_by_hand() -> None:
    assert published_costs.ralp_values(OUTPUTS, PARAMETERS, 2, 2) == 2 * 2 * 500 + 2 * 450
    assert published_costs.ralp_values(OUTPUTS, PARAMETERS, 2, 4) == 2 * 10_450  # no activations travel


def test_ralp_cuts_where_outputs_are_few_and_many_parameters_follow() -> None:
    cuts = [published_costs.ralp_values(OUTPUTS, PARAMETERS, 2, c) for c in (1, 2, 3, 4)]
    assert cuts == [4100, 2900, 19_300, 20_900]
    assert published_costs.ralp_cut(OUTPUTS, PARAMETERS, 2, [9, 9, 1, 1], workers=4, speed=1.0) == 2


def test_ralp_leaves_to_the_servers_only_what_they_have_time_for() -> None:
    assert published_costs.ralp_cut(OUTPUTS, PARAMETERS, 2, [9, 9, 1, 1], workers=40, speed=1.0) == 4
    assert published_costs.ralp_cut(OUTPUTS, PARAMETERS, 2, [9, 9, 1, 1], workers=40, speed=8.0) == 2
    with pytest.raises(ValueError, match="speed"):
        published_costs.ralp_cut(OUTPUTS, PARAMETERS, 2, [9, 9, 1, 1], workers=1, speed=0.0)
    with pytest.raises(ValueError, match="cut"):
        published_costs.ralp_values(OUTPUTS, PARAMETERS, 2, 0)


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 3), min_size=1, max_size=6), st.integers(0, 50), st.integers(1, 9))
def test_no_cut_that_servers_can_keep_up_with_moves_less(
    layers: list[tuple[int, int, int]], rows: int, workers: int
) -> None:
    outputs, parameters, seconds = ([x[i] for x in layers] for i in range(3))
    found = published_costs.ralp_cut(outputs, parameters, rows, seconds, workers, 2.0)
    for c in range(1, len(layers) + 1):
        if workers * sum(seconds[c:]) / 2 <= sum(seconds[:c]):
            values = published_costs.ralp_values(outputs, parameters, rows, c)
            assert published_costs.ralp_values(outputs, parameters, rows, found) <= values
