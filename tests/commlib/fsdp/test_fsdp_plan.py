"""Plans of sharded models: which rules mean what, and which do not."""

from __future__ import annotations

from typing import Any

import pytest

from commlib.codecs.base import LayerSpec
from commlib.codecs.registry import make
from commlib.fsdp.plan import Replicas, codecs_of, plan_of
from commlib.groups.world import World
from commlib.planning.plan import Plan
from commlib.planning.policy import Exact
from commlib.planning.route import Route

SPECS = [LayerSpec("a.weight", (64, 32)), LayerSpec("a.bias", (64,)), LayerSpec("b.weight", (10, 64))]


def planned(rules: Any, replicas: Replicas | None = None) -> Plan:
    return plan_of(SPECS, rules, world=2, min_size=100, replicas=replicas)


def test_layers_go_to_their_owners_by_their_codecs_and_small_ones_as_they_are() -> None:
    routes = {p.spec.name: str(p.route) for p in planned({"a.*": "onebit"})}
    assert routes == dict.fromkeys(routes, "none@reduce_scatter") | {"a.weight": "onebit@reduce_scatter"}


@pytest.mark.parametrize(
    "rule", ["onebit", "onebit@reduce_scatter", make("onebit"), Route("reduce_scatter", make("onebit"))]
)
def test_a_codec_by_any_name_is_the_same_plan(rule: Any) -> None:
    assert planned(rule).describe() == planned("onebit").describe()


def test_the_share_of_dense_is_that_of_a_reduce_scatter() -> None:
    line = next(line for line in str(planned("none")).splitlines() if line.startswith("a.weight"))
    assert "4,096" in line  # half of 64·32·4 bytes
    assert "1/1.0" in line


def test_exact_is_plain_and_says_why() -> None:
    plan = planned(Exact())
    assert plan.plain
    assert "nothing else is exact for these gradients" in str(plan)


def test_replicas_take_routes_of_replicas() -> None:
    mesh = Replicas.of(World(1, 2), World(0, 2))
    assert (mesh.rank, mesh.nodes) == (1, ((0, 1), (2, 3)))
    plan = planned("onebit", mesh)
    assert str(plan.layers["a.weight"].route) == "onebit@gather"
    assert "HSDP: dense over 2 shards, routes between 2 replicas" in str(plan)
    own = mesh.share(make("onebit"), LayerSpec("odd", (5, 8)))
    assert (own.start, own.spec.shape, own.world) == (3, (2, 8), World(0, 2))
    with pytest.raises(ValueError, match="between replicas of shards"):
        planned("powersgd", mesh)
    with pytest.raises(ValueError, match="between replicas of shards"):
        plan_of(
            [LayerSpec("a.weight", (64, 32), kind="linear.weight", layer="a")],
            "factors",
            world=2,
            min_size=0,
            replicas=mesh,
        )


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ("powersgd", ValueError, "cannot be shared out by rows"),
        ("blocks", ValueError, "cannot be shared out by rows"),
        ("onebit@gather", ValueError, "by no other exchange"),
        (Route("gather", make("onebit")), ValueError, "by no other exchange"),
        ("auto", None, ""),
        ({"a.*": "auto"}, TypeError, "for a whole model"),
        ("lossy:onebit", TypeError, "no plan before that"),
        ({"c.*": "onebit"}, ValueError, "matches no trained parameter"),
    ],
)
def test_other_rules_are_refused(rules: Any, error: type[Exception] | None, words: str) -> None:
    if error is None:
        assert planned(rules).plain
        return
    with pytest.raises(error, match=words):
        planned(rules)


def test_a_plan_of_replicas_is_refused() -> None:
    with pytest.raises(TypeError, match="routes of replicas"):
        planned(planned("onebit"))


def test_values_come_by_codecs_that_neither_remember_nor_draw() -> None:
    assert {n: str(c) for n, c in codecs_of(SPECS, {"a.*": "bf16", "*": "int8"}, 100).items()} == {
        "a.weight": str(codecs_of(SPECS, "bf16", 100)["a.weight"]),
        "b.weight": "int8:ef=off",
    }
    assert codecs_of(SPECS, None, 0) == {}
    assert codecs_of(SPECS, "none", 0) == {}
    assert "a.weight" in codecs_of(SPECS, make("int8"), 0)  # its feedback is taken off
    for rule, error, words in (
        ("qsgd", ValueError, "draws at random"),
        ("dgc", ValueError, "keeps its"),
        ("int8@gather", ValueError, "names an exchange"),
        (Route("gather", make("int8")), TypeError, "is a route"),
        ({"c": "int8"}, ValueError, "matches no parameter"),
        ("itn8", ValueError, "did you mean"),
    ):
        rules: Any = rule
        with pytest.raises(error, match=words):
            codecs_of(SPECS, rules, 0)
