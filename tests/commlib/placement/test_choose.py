"""The choice of layers to place: the shortest step there is, where that can be shown, and never a longer one."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.messaging.link_model import Link
from commlib.placement.choose import PlaceableLinear, PlacementMeasurements, _without, decide, placed_way, ways_of
from commlib.planning.cost.choose import MARGIN, choose
from commlib.planning.cost.route_cost import dense

SLOW = Link.ring(4, 0.2, 1e-4)  # 200 Mbit/s


def layer(n: int, m: int, rows: int, **more: float) -> PlaceableLinear:
    given = {
        "input_grad": True,
        "seen_s": 0.01,
        "local_s": 0.01,
        "rebuild_s": 0.04,
        "whole_s": 0.02,
        "part_s": 0.005,
        **more,
    }
    return PlaceableLinear(n, m, rows, **given)  # type: ignore[arg-type]


def figures(layers: dict[str, PlaceableLinear], link: Link = SLOW) -> PlacementMeasurements:
    units = {name: (0.02 + i / 100, x.n * x.m * 4) for i, (name, x) in enumerate(layers.items())}
    return PlacementMeasurements(link, layers, {**units, "norm": (0.1, 400)}, 0.1)


def test_a_tall_layer_of_few_rows_on_a_slow_link_is_placed_and_says_why() -> None:
    found = decide(figures({"head": layer(20_000, 500, 32)}))
    assert found.placed == ("head",)
    assert found.seconds < found.others_s
    assert "4 ranks, 200 Mbit/s" in str(found)
    assert "yes" in str(found).splitlines()[2]


def test_many_rows_or_a_fast_link_leave_it_where_it_is() -> None:
    many = decide(figures({"head": layer(2000, 500, 5000)}))
    assert many.placed == ()
    assert many.seconds == many.others_s
    assert "dense costs" in str(many)
    fast = decide(figures({"head": layer(2000, 500, 32, part_s=0.02, rebuild_s=0.011)}, Link.ring(4, 1000.0, 1e-3)))
    assert fast.placed == ()


def test_by_hand_a_way_is_its_bytes_one_after_another_less_what_its_part_takes_less() -> None:
    way = placed_way(layer(8, 6, 5), SLOW)
    sent = 3 * 40 + 4 * (2 * 3 * 5 * 6 + 2 * 3 * 5 * 8 / 4)
    assert way.sent == sent
    assert way.link_s == pytest.approx(5 * SLOW.all_gather.alpha + sent * SLOW.all_gather.beta)
    assert way.saved_s == pytest.approx(0.015)
    first = placed_way(dataclasses.replace(layer(8, 6, 5), input_grad=False), SLOW)
    assert way.sent - first.sent == 4 * 3 * 5 * 6


LAYERS = st.builds(
    PlaceableLinear,
    n=st.integers(1, 5000),
    m=st.integers(1, 5000),
    rows=st.integers(1, 500),
    input_grad=st.booleans(),
    seen_s=st.floats(0, 0.5),
    local_s=st.floats(0, 0.1),
    rebuild_s=st.floats(0, 0.3),
    whole_s=st.floats(0, 0.1),
    part_s=st.floats(0, 0.1),
)


def seconds(f: PlacementMeasurements, put: tuple[str, ...]) -> float:
    ways = {n: ways_of(x, f.link) for n, x in f.layers.items()}
    every = {n: dense(nbytes, f.link) for n, (_, nbytes) in f.units.items() if n not in put}
    others = {n: w[1:-1] for n, w in ways.items() if n not in put}
    return choose(_without(f.seen(), put), every, others).seconds + sum(ways[n][-1].alone_s for n in put)


@given(LAYERS, st.floats(0.01, 10), st.integers(2, 32))
def test_of_one_layer_the_choice_is_the_shorter_step(x: PlaceableLinear, gbit_s: float, world: int) -> None:
    f = figures({"one": x}, Link.ring(world, gbit_s, 1e-4))
    found = decide(f, worth=0.0)
    puts: list[tuple[str, ...]] = [(), ("one",)]
    by = {put: seconds(f, put) for put in puts}
    assert found.seconds == by[found.placed]
    assert found.seconds <= (1 + MARGIN) * min(by.values())


@given(st.lists(LAYERS, min_size=2, max_size=4), st.floats(0.01, 10))
def test_no_single_change_and_neither_all_nor_none_is_shorter(layers: list[PlaceableLinear], gbit_s: float) -> None:
    f = figures({f"layer {i}": x for i, x in enumerate(layers)}, Link.ring(4, gbit_s, 1e-4))
    found = decide(f, worth=0.0)
    assert found.seconds == pytest.approx(seconds(f, found.placed))
    assert found.seconds <= found.others_s == seconds(f, ())
    least = min(seconds(f, put) for r in range(len(layers) + 1) for put in itertools.combinations(f.layers, r))
    assert least <= found.seconds + 1e-12  # added up in another order


@given(st.lists(LAYERS, min_size=1, max_size=4), st.floats(0.01, 10))
def test_nothing_is_placed_for_less_than_it_is_worth(layers: list[PlaceableLinear], gbit_s: float) -> None:
    found = decide(figures({f"layer {i}": x for i, x in enumerate(layers)}, Link.ring(4, gbit_s, 1e-4)))
    assert not found.placed or found.seconds <= 0.95 * found.others_s
