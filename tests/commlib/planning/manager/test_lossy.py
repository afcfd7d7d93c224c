"""``Lossy``: what may be compressed is, but only where that buys time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from commlib.messaging.link_model import AlphaBeta, Link
from commlib.planning.cost.choose import choose as choose_exact
from commlib.planning.cost.choose import compress_too
from commlib.planning.cost.overlap import Bucket, TrainingPass
from commlib.planning.cost.route_cost import Candidate, compressed
from commlib.planning.manager.candidates import CandidateModel, _Known, routes
from commlib.planning.manager.codec_cost import CodecCost
from commlib.planning.manager.controller import Controller
from commlib.planning.manager.measurements import Measurements, slowest
from commlib.planning.planner import make_plan
from commlib.runtime.layers import layer_specs, linear_layers

LINK = Link(4, AlphaBeta(1e-4, 1e-7), AlphaBeta(1e-4, 1e-7))  # 80 Mbit/s
FREE = CodecCost(AlphaBeta(0, 1e-12), AlphaBeta(0, 1e-12), 2, 0)
ROUTE = "onebit@scatter_gather"


def plain(seconds: float) -> Candidate:
    return Candidate("dense", seconds, seconds, 0.0)


def other(route: str, seconds: float) -> Candidate:
    return Candidate(route, seconds, seconds, 0.0)


def test_what_hides_behind_the_backward_pass_stays_exact() -> None:
    p = TrainingPass((Bucket(1, ("hidden",)), Bucket(10, ("last",))), {}, 10)
    exact = choose_exact(p, {"hidden": plain(5), "last": plain(6)}, {})
    found = compress_too(p, exact, {n: [other("onebit", 0.2)] for n in ("hidden", "last")})
    assert {n: w.route for n, w in found.ways.items()} == {"hidden": "dense", "last": "onebit"}
    assert "hides behind the backward pass" in found.reasons["hidden"]
    assert (found.seconds, found.dense_s) == (10.2, 16)


def test_a_layer_that_goes_by_rows_is_compressed_only_if_that_is_faster_still() -> None:
    p = TrainingPass((Bucket(1, ("a",)), Bucket(1, ("b",))), {"a": 0, "b": 0}, 1)
    dense_ways = {"a": plain(10), "b": plain(10)}
    exact = choose_exact(p, dense_ways, {"a": [other("factors", 0.1)], "b": [other("factors", 5)]})
    found = compress_too(p, exact, {"a": [other("onebit", 0.5)], "b": [other("onebit", 0.5)]})
    assert {n: w.route for n, w in found.ways.items()} == {"a": "factors", "b": "onebit"}
    assert found.dense == dense_ways
    assert found.reasons["a"] == exact.reasons["a"]
    assert found.reasons["b"] == "costs 500 ms, factors would cost 5e+03 ms"


def test_of_several_codecs_a_layer_takes_the_one_that_costs_least() -> None:
    p = TrainingPass((Bucket(1, ("a",)),), {}, 1)
    exact = choose_exact(p, {"a": plain(10)}, {})
    found = compress_too(p, exact, {"a": [other("fp16", 5), other("onebit", 2), other("topk", 3)]})
    assert found.ways["a"].route == "onebit"


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(200, 100), nn.Linear(100, 50), nn.LayerNorm(50))


def model() -> CandidateModel:
    specs = layer_specs(net())
    return CandidateModel(specs, linear_layers(net()), {ROUTE: make_plan(specs, "onebit", world=4, min_size=1024)})


def smaller(
    m: CandidateModel, name: str, f: Measurements | None = None, costs: dict[str, CodecCost] | None = None
) -> list[Candidate]:
    p = TrainingPass((), {"0": 0.0, "1": 0.0}, 0.0)
    products = {"0": (0.001, 0.004)}
    return m._smaller(name, _Known(p, f or figures(), LINK, products), costs or {ROUTE: FREE})


def test_a_units_payload_is_that_of_its_weight_and_its_bias_goes_beside_it() -> None:
    plan = make_plan(layer_specs(net()), "onebit", world=4, min_size=1024)
    weight = plan.layers["0.weight"]
    sent = weight.route.carrier().wire_bytes(weight.route.codec, weight.spec, 4)
    (way,) = smaller(model(), "0")
    assert way == compressed(ROUTE, sent, LINK, gathers=2, reduces=0, before_s=20000e-12, after_s=20000e-12, plain=400)
    assert way.sent == pytest.approx(sent + 600)
    assert smaller(model(), "2.weight") == []  # too small for this codec


def figures(**more: Any) -> Measurements:
    names = (("2.bias", "2.weight"), ("1.bias", "1.weight"), ("0.bias", "0.weight"))
    f = Measurements(5, 0.2, 0.0, (0.01, 0.02, 0.03), names, 0.03, {}, {}, codecs={ROUTE: FREE}, link=LINK)
    return dataclasses.replace(f, **more)


def test_the_pilot_tries_codecs_and_says_which_layers() -> None:
    pilot = Controller(model())
    decision = pilot.first()
    for _ in range(3):
        decision = pilot.review(figures())
        if decision.phase == "trial":
            break
    assert decision.routes == {"0": ROUTE, "1": ROUTE}
    assert decision.rows == {}
    assert "2 layers by other routes than dense" in decision.said
    settled = pilot.review(figures(span=0.05, link=None, codecs={}))
    assert (settled.phase, settled.routes) == ("steady", decision.routes)


def test_it_goes_back_to_dense_if_codecs_lose_in_practice() -> None:
    pilot = Controller(model())
    pilot.first()
    for _ in range(40):
        decision = pilot.review(figures(span=0.25 if pilot._now.routes else 0.2))
        if decision.phase == "steady":
            break
    assert decision.phase == "steady"
    assert decision.routes == {}
    assert any("lost in practice" in why for why in decision.why.values())


def test_without_codec_figures_nothing_is_compressed() -> None:
    m, f, link = model(), figures(codecs={}), LINK.slower(8)
    assert routes(m.choose(m.seen(f), f, link, {}, {}, {}, 0.0), {}) == {}
    assert routes(m.choose(m.seen(f), f, link, {}, {ROUTE: FREE}, {}, 0.0), {}) == {"0": ROUTE, "1": ROUTE}
    assert routes(m.choose(m.seen(f), f, link, {}, {ROUTE: FREE}, {"0": "lost"}, 0.0), {}) == {"1": ROUTE}


def test_codec_figures_travel_and_the_slowest_rank_counts() -> None:
    slow = CodecCost(AlphaBeta(1.0, 1e-12), AlphaBeta(0, 1e-12), 2, 0)
    ranks = [Measurements.from_wire(figures().to_wire()), figures(codecs={ROUTE: slow})]
    assert ranks[0] == figures()
    assert slowest(ranks).codecs == {ROUTE: slow}


def test_a_probe_with_which_the_last_steps_could_not_have_been_is_not_believed() -> None:
    pilot = Controller(model())
    pilot.first()
    for _ in range(40):
        decision = pilot.review(figures())
        if decision.phase == "steady" and not decision.probe:
            break
    before, routes_before = pilot._known.link, decision.routes
    far_slower = Link(4, AlphaBeta(1e-4, 1e-4), AlphaBeta(1e-4, 1e-4))
    pilot._now = dataclasses.replace(decision, probe=True)
    decision = pilot.review(figures(link=far_slower))
    assert "not believed: 0.08 Mbit/s" in decision.said
    assert (decision.routes, decision.phase, pilot._known.link) == (routes_before, "steady", before)


def test_a_probe_that_is_not_believed_is_made_once_more() -> None:
    """Something was in its way, perhaps; but if the next is not believed either, another must be earned."""
    pilot = Controller(model())
    pilot.first()
    for _ in range(40):
        decision = pilot.review(figures(span=0.2))
        if decision.phase == "steady" and not decision.probe:
            break
    far_slower = Link(4, AlphaBeta(1e-4, 1e-4), AlphaBeta(1e-4, 1e-4))
    pilot._reference = figures(span=0.2)
    probes, believed = 0, 0
    for _ in range(10):
        decision = pilot.review(figures(span=0.4, link=far_slower if decision.probe else None))
        probes += decision.probe
        believed += "instead of" in decision.said and not decision.probe
    assert probes == 2
    assert not believed


BY_ROWS = "int8:ef=off@factors"


def test_a_probe_is_judged_by_what_it_is_worth_in_training() -> None:
    """One that has always said a third of what steps show is believed when it says that of another link."""
    pilot = Controller(model())
    pilot.first()
    for _ in range(40):
        decision = pilot.review(figures(span=0.2, link=LINK.slower(40)))
        if decision.phase == "steady" and not decision.probe:
            break
    assert pilot._known._slower < 0.5
    pilot._now = dataclasses.replace(decision, probe=True)
    decision = pilot.review(figures(span=0.4, link=LINK.slower(80)))
    assert "not believed" not in decision.said
    assert "instead of" in decision.said


def test_compressed_rows_are_a_way_where_rows_were_seen_and_their_products_measured() -> None:
    specs, cost = layer_specs(net()), CodecCost(AlphaBeta(0.0, 1e-6), AlphaBeta(0.0, 2e-6), 1, 0)
    plan = make_plan(specs, BY_ROWS, world=4, min_size=1024)
    m = CandidateModel(specs, linear_layers(net()), {BY_ROWS: plan})
    seen = figures(rows={"0": 16, "1": 16}, arithmetic="alike")
    (way,) = smaller(m, "0", seen, {BY_ROWS: cost})
    spec = dataclasses.replace(plan.layers["0.weight"].spec, rows=16)
    sent = plan.layers["0.weight"].route.carrier().wire_bytes(plan.layers["0.weight"].route.codec, spec, 4)
    assert (way.route, way.early, way.saved_s) == (BY_ROWS, True, 0.001)
    assert way.sent == sent + 3 * 16  # and a header for each of the others
    assert way.before_s == pytest.approx(16 * 300 * 1e-6)
    assert way.after_s == pytest.approx(0.004 + 16 * 300 * 2e-6)
    assert smaller(m, "1", seen, {BY_ROWS: cost}) == []  # nobody has measured its products
    assert smaller(m, "0", figures(), {BY_ROWS: cost}) == []  # or seen its rows
    assert smaller(m, "0", figures(rows={"0": 16}), {BY_ROWS: cost}) == []  # or knows that ranks multiply alike


def test_products_are_measured_where_compressed_rows_may_pay_though_plain_ones_do_not() -> None:
    specs = layer_specs(net())
    plain = CandidateModel(specs, linear_layers(net()))
    coded = CandidateModel(specs, linear_layers(net()), {BY_ROWS: make_plan(specs, BY_ROWS, world=4, min_size=1024)})
    rows = {"0": 60}  # 60 · 300 of 4 bytes: more than half of 20100
    assert plain.worth_measuring(rows, 4) == {}
    assert coded.worth_measuring(rows, 4) == {"0": (100, 200, 60)}
