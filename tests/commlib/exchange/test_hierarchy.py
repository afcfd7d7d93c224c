"""Nodes, from what ranks say of themselves or from a mesh: they partition the world, or the error says what is odd."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.codecs.base import LayerSpec
from commlib.codecs.registry import make
from commlib.exchange.hierarchy import Hierarchy, RankPlace, of_mesh, of_places, refuse, share
from commlib.groups.world import World
from commlib.planning.plan import Plan, PlannedLayer
from commlib.planning.route import Route, resolve

TORCHRUN = {"GROUP_RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@st.composite
def jobs(draw: st.DrawFn) -> list[RankPlace]:
    """Ranks of a job in any order, on nodes with any numbers."""
    nodes, local = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    numbers = draw(st.lists(st.integers(0, 99), min_size=nodes, max_size=nodes, unique=True))
    return draw(st.permutations([RankPlace(n, i, local) for n in numbers for i in range(local)]))


@given(jobs())
def test_local_groups_and_inter_groups_each_partition_the_world_and_meet_in_one_rank(places: list[RankPlace]):
    found = [of_places(places, r, whole=True) for r in range(len(places))]
    assert len({h.nodes for h in found}) == 1
    for groups in ({h.local_ranks for h in found}, {h.counterparts for h in found}):
        assert sorted(r for group in groups for r in group) == list(range(len(places)))
        assert len({len(group) for group in groups}) == 1
    for h in found:
        assert set(h.local_ranks) & set(h.counterparts) == {h.rank}
        assert h.local_ranks[h.local.rank] == h.counterparts[h.inter.rank] == h.rank
        assert {places[r].node for r in h.local_ranks} == {places[h.rank].node}
        assert {places[r].rank for r in h.counterparts} == {places[h.rank].rank}
        assert h.local.size * h.inter.size == len(places)


@given(jobs())
def test_a_mesh_of_the_same_nodes_is_the_same_hierarchy(places: list[RankPlace]):
    h = of_places(places, 0, whole=True)
    members = [7 * r + 3 for r in range(len(places))]  # a model on some of the ranks: global numbers are others
    assert of_mesh([[members[r] for r in node] for node in h.nodes], members, 0) == h


@given(jobs(), st.integers(0, 40), st.sampled_from(["none", "onebit"]))
def test_the_shares_of_a_nodes_ranks_cover_a_layer_once_and_counterparts_have_the_same(places, rows, spec):
    layer, codec = LayerSpec("x", (rows, 7)), make(spec)
    shares = {r: of_places(places, r, whole=True).share(codec, layer) for r in range(len(places))}
    h = of_places(places, 0, whole=True)
    ends = [(shares[r].start, shares[r].start + shares[r].spec.shape[0]) for r in h.local_ranks]
    assert ends[0][0] == 0
    assert ends[-1][1] == rows
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    assert {(shares[r].start, shares[r].spec) for r in h.counterparts} == {(shares[0].start, shares[0].spec)}
    assert sorted(shares[r].world.rank for r in h.counterparts) == list(range(len(h.nodes)))


def test_a_scalar_is_one_row_of_the_first_local_rank():
    shares = [Hierarchy(((0, 1), (2, 3)), r).share(make("none"), LayerSpec("x", ())) for r in range(4)]
    assert [s.spec.numel for s in shares] == [1, 0, 1, 0]


def test_without_a_hierarchy_a_rank_exchanges_all_of_a_layer_with_all_ranks():
    layer = LayerSpec("x", (5, 3))
    part = share(resolve("onebit", 3), layer, World(1, 3), None)
    assert (part.spec, part.start, part.prefix, part.world) == (layer, 0, "", World(1, 3))


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_variable_that_torchrun_did_not_set_is_named(name: str):
    with pytest.raises(ValueError, match=rf"needs {name},.*torchrun.*mesh"):
        RankPlace.of({k: v for k, v in TORCHRUN.items() if k != name})


@pytest.mark.parametrize("value", ["", "two", "-1", "1.5"])
def test_a_variable_that_is_no_number_is_named_with_its_value(value: str):
    with pytest.raises(ValueError, match=f"LOCAL_RANK='{value}'.*whole numbers"):
        RankPlace.of({**TORCHRUN, "LOCAL_RANK": value})


def test_the_environment_of_torchrun_is_read():
    assert RankPlace.of(TORCHRUN) == RankPlace(node=1, rank=0, size=2)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (
            [RankPlace(0, 0, 2), RankPlace(0, 1, 2), RankPlace(1, 0, 1)],
            "equally many ranks on each node.* 2 on node 0, 1 on",
        ),
        ([RankPlace(0, 0, 2), RankPlace(0, 0, 2)], "ranks 0 and 1 both say LOCAL_RANK 0 on node 0"),
        ([RankPlace(0, 0, 2), RankPlace(0, 1, 3)], "ranks 0 and 1 are on node 0, with LOCAL_WORLD_SIZE 2 and 3"),
        ([RankPlace(0, 2, 2), RankPlace(0, 1, 2)], "rank 0 has LOCAL_RANK 2 of LOCAL_WORLD_SIZE 2"),
        ([RankPlace(0, 0, 4), RankPlace(0, 1, 4)], "node 0 has 2 of the ranks, and they say LOCAL_WORLD_SIZE 4"),
    ],
)
def test_ranks_that_contradict_each_other_are_an_error_that_names_them_alike_on_all(places: list[RankPlace], said: str):
    errors = set()
    for rank in range(len(places)):
        with pytest.raises(ValueError, match=said) as caught:
            of_places(places, rank, whole=True)
        errors.add(str(caught.value))
    assert len(errors) == 1
    assert "hierarchy" in errors.pop()  # what to do


def test_a_model_on_some_ranks_of_each_node_has_a_hierarchy_of_these():
    places = [RankPlace(0, 1, 4), RankPlace(0, 3, 4), RankPlace(1, 1, 4), RankPlace(1, 3, 4)]
    assert of_places(places, 2, whole=False) == Hierarchy(((0, 1), (2, 3)), 2)


@pytest.mark.parametrize("mesh", [[[0, 1], [2, 4]], [[0, 1]], [[0, 1], [2, 3], [4, 5]], [[0, 1], [1, 2]]])
def test_a_mesh_of_other_ranks_is_an_error_that_names_both(mesh: list[list[int]]):
    with pytest.raises(ValueError, match=r"the mesh has ranks .*reduced over 0, 1, 2, 3: .* a row for each node"):
        of_mesh(mesh, [0, 1, 2, 3], 0)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [(((0, 1, 2),), "flat: all ranks (3) are on one node"), (((0,), (1,)), "flat: one rank on each of 2 nodes")],
)
def test_one_node_and_one_rank_a_node_are_flat_for_a_reason(nodes: tuple[tuple[int, ...], ...], why: str):
    assert Hierarchy(nodes, 0).flat() == why


def test_two_nodes_of_two_are_not_flat():
    h = Hierarchy(((0, 1), (2, 3)), 3)
    assert h.flat() == ""
    assert h.about() == "dense inside a node of 2, routes between 2 nodes"
    assert str(h) == "0,1 2,3"


@pytest.mark.parametrize("spec", ["factors", "int8@factors"])
def test_rows_are_shared_out_to_nobody_and_go_to_all_ranks(spec: str):
    h, layer, world = Hierarchy(((0, 1), (2, 3)), 2), LayerSpec("x", (64, 64), layer="x"), World(2, 4)
    assert refuse(resolve(spec, 2), layer) is None
    assert share(resolve(spec, 2), layer, world, h) == share(resolve(spec, 4), layer, world, None)
    assert share(resolve("none", 2), layer, world, h) != share(resolve("none", 2), layer, world, None)


@pytest.mark.parametrize("spec", ["none", "fp16", "onebit@gather", "onebit@scatter_gather", "topk", "dgc", "randomk"])
def test_routes_with_nothing_but_memory_of_the_layers_shape_go_between_nodes(spec: str):
    assert refuse(resolve(spec, 4), LayerSpec("x", (64, 64), layer="x")) is None


@pytest.mark.parametrize(
    ("route", "said"),
    [
        (Route("low_rank", make("powersgd")), "dense, gather, scatter_gather, factors, owners do"),
        (Route("gather", make("powersgd")), "its basis cannot be shared out by rows"),
    ],
)
def test_other_routes_are_refused_and_what_works_is_named(route: Route, said: str):
    reason = refuse(route, LayerSpec("x", (64, 64), layer="x"))
    assert reason is not None
    assert said in reason


def plan(spec: str, shape: tuple[int, ...], nodes: int, local: int) -> Plan:
    route = resolve(spec, nodes)
    layer = PlannedLayer(LayerSpec("x", shape), route, resolve("none", nodes), "a test")
    return Plan({"x": layer}, nodes).noted("two levels", local=local)


def test_the_plan_shows_the_bytes_that_the_busiest_rank_sends_to_other_nodes():
    # 5 rows of 100 float32 over 2 local ranks: 3 and 2 rows; a ring of 2 nodes sends 2·1/2 of them
    text = str(plan("none", (5, 100), nodes=2, local=2))
    assert text.splitlines()[0] == "two levels"
    assert "1,200" in text
    assert "1/2.5" in text  # of the 2·3/4·2000 that a rank sends in a flat ring


def test_the_plan_shows_the_bytes_of_rows_that_go_to_all_ranks():
    route, rows = resolve("factors", 2), 3
    spec = LayerSpec("x", (64, 48), kind="linear.weight", layer="l", rows=rows)
    text = str(Plan({"x": PlannedLayer(spec, route, resolve("none", 2), "a test")}, 2).noted("", local=2))
    assert f"{3 * rows * (64 + 48) * 4:,}" in text  # to P − 1 = 3 ranks, in a ring of all four


def test_a_plan_file_keeps_how_many_ranks_a_node_has(tmp_path):
    before = plan("onebit", (64, 64), nodes=3, local=2)
    before.save(tmp_path / "plan.json")
    assert str(Plan.load(tmp_path / "plan.json")) == str(before)
