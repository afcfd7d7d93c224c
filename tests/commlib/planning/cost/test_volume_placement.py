"""What placed layers cost, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.planning.cost import volume
from commlib.planning.cost import volume as placement
from commlib.planning.cost.volume import FactorableShape


def test_sparks_equations_by_hand() -> None:
    # 4 layers of 10, 6, 8, 3 neurons; 4 processes; 5 examples
    sizes = [10, 6, 8, 3]
    assert placement.spark_messages(4, 4, 5) == 5 * (3 + 2 * (4 * 2 + 2 * 3)) == 155
    assert placement.spark_ends(sizes, 4, 5) == 5 * 3 * (10 + 3 / 4) == 161.25
    assert placement.spark_forward(sizes, 4, 5) == 5 * 3 * (6 + 8) == 210
    assert placement.spark_backward(sizes, 4, 5) == 5 * 3 * ((8 + 6) + (3 + 8)) == 375
    assert placement.spark_values(sizes, 4, 5) == 161.25 + 210 + 375
    assert placement.spark_seconds(0.5, 0.25, 155, 746.25) == 77.5 + 186.5625


def test_one_process_has_nothing_to_send_and_without_hidden_layers_there_are_only_ends() -> None:
    assert placement.spark_values([10, 6, 3], 1, 5) == placement.spark_messages(3, 1, 5) == 0
    assert placement.spark_values([10, 3], 2, 1) == placement.spark_ends([10, 3], 2, 1) == 11.5


@pytest.mark.parametrize(("layers", "processes", "examples"), [(1, 2, 3), (3, 0, 3), (3, 2, -1)])
def test_networks_that_cannot_be_are_refused(layers: int, processes: int, examples: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        placement.spark_messages(layers, processes, examples)


OUTPUTS, PARAMETERS = [1000, 500, 100, 10], [50, 400, 9000, 1000]


def test_ralps_values_by_hand() -> None:
    assert placement.ralp_values(OUTPUTS, PARAMETERS, 2, 2) == 2 * 2 * 500 + 2 * 450
    assert placement.ralp_values(OUTPUTS, PARAMETERS, 2, 4) == 2 * 10_450  # no activations travel


def test_ralp_cuts_where_outputs_are_few_and_many_parameters_follow() -> None:
    cuts = [placement.ralp_values(OUTPUTS, PARAMETERS, 2, c) for c in (1, 2, 3, 4)]
    assert cuts == [4100, 2900, 19_300, 20_900]
    assert placement.ralp_cut(OUTPUTS, PARAMETERS, 2, [9, 9, 1, 1], workers=4, speed=1.0) == 2


def test_ralp_leaves_to_the_servers_only_what_they_have_time_for() -> None:
    assert placement.ralp_cut(OUTPUTS, PARAMETERS, 2, [9, 9, 1, 1], workers=40, speed=1.0) == 4
    assert placement.ralp_cut(OUTPUTS, PARAMETERS, 2, [9, 9, 1, 1], workers=40, speed=8.0) == 2
    with pytest.raises(ValueError, match="speed"):
        placement.ralp_cut(OUTPUTS, PARAMETERS, 2, [9, 9, 1, 1], workers=1, speed=0.0)
    with pytest.raises(ValueError, match="cut"):
        placement.ralp_values(OUTPUTS, PARAMETERS, 2, 0)


@given(st.lists(st.tuples(*[st.integers(0, 1000)] * 3), min_size=1, max_size=6), st.integers(0, 50), st.integers(1, 9))
def test_no_cut_that_servers_can_keep_up_with_moves_less(
    layers: list[tuple[int, int, int]], rows: int, workers: int
) -> None:
    outputs, parameters, seconds = ([x[i] for x in layers] for i in range(3))
    found = placement.ralp_cut(outputs, parameters, rows, seconds, workers, 2.0)
    for c in range(1, len(layers) + 1):
        if workers * sum(seconds[c:]) / 2 <= sum(seconds[:c]):
            values = placement.ralp_values(outputs, parameters, rows, c)
            assert placement.ralp_values(outputs, parameters, rows, found) <= values


def test_a_placed_layer_by_hand() -> None:
    s = FactorableShape(m=9216, n=4096, rows=32, workers=4, servers=4)
    assert placement.placed_sent(s) == (884_736, 98_304, 98_304, 884_736)
    assert placement.placed(s, input_grad=False) == 2 * (884_736 + 2 * 98_304)
    assert placement.placed(s, input_grad=False) < volume.factors(s) < volume.ps_colocated(s)
    assert volume.factors(s) < placement.placed(s)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 500), st.integers(2, 64))
def test_it_moves_less_than_factors_where_the_rule_says_so(m: int, n: int, rows: int, workers: int) -> None:
    s = FactorableShape(m, n, rows, workers, workers)
    assert (placement.placed(s) < volume.factors(s)) == (workers * m < n * (workers - 2))
    assert (placement.placed(s, input_grad=False) < volume.factors(s)) == (workers > 2)
