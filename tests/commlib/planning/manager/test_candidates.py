"""What may be chosen for a model, why not, and what a probe's link is worth in training."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from commlib.messaging.link_model import AlphaBeta, Link
from commlib.planning.cost import volume
from commlib.planning.cost.choose import RouteChoice
from commlib.planning.cost.overlap import Bucket, TrainingPass
from commlib.planning.cost.route_cost import Candidate, factors, owners, owners_sent, push_pull
from commlib.planning.manager.candidates import CandidateModel, DecisionUnit, by_gain, routes
from commlib.planning.manager.measurements import Measurements
from commlib.planning.planner import make_plan
from commlib.runtime.layers import layer_specs, linear_layers

TIMES = st.lists(st.tuples(st.floats(0.1, 1), st.floats(0, 1)), min_size=1, max_size=6)
SLOW = Link(4, AlphaBeta(1e-4, 1e-7), AlphaBeta(5e-5, 1e-7))
ONE_S = Link(2, AlphaBeta(0, 1e-3), AlphaBeta(0, 0))  # takes a second for 250 values
Case = tuple[CandidateModel, TrainingPass, Link]
NOT_FOR_OWNERS = {"rows": {"fc": 12, "head": 3}}  # with a block they would be more bytes than the gradient
NO_FIGURES = Measurements(1, 0.0, 0.0, (), (), 0.0, {}, {})


class Net(nn.Module):
    """A linear layer with bias and one without, two that share a weight, a norm and a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(60, 40), nn.Linear(40, 30, bias=False)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.ones(7))


def model_of(module: nn.Module) -> CandidateModel:
    return CandidateModel(layer_specs(module), linear_layers(module))


def chain(sizes: list[int]) -> CandidateModel:
    """Layers 0, 1, … of so many values each."""
    return model_of(nn.Sequential(*(nn.Linear(n, 1, bias=False) for n in sizes)))


def all_dense(model: CandidateModel, p: TrainingPass, link: Link, missing_s: float = 0.0) -> float:
    """Seconds predicted for a step without any change."""
    return model.choose(p, NO_FIGURES, link, {}, {}, {}, missing_s).dense_s


def test_a_linear_layer_is_a_unit_with_its_bias_and_any_other_parameter_is_one_by_itself() -> None:
    model = model_of(Net())
    assert model.unit_of["fc.weight"] == model.unit_of["fc.bias"] == "fc"
    assert model.units["fc"] == DecisionUnit("fc", (2400 + 40) * 4, (40, 60), 4)
    assert model.units["head"] == DecisionUnit("head", 1200 * 4, (30, 40), 4)
    values = {"a.weight": 64, "a.bias": 8, "b.bias": 8, "norm.weight": 5, "norm.bias": 5, "scale": 7}
    assert len(model.units) == 2 + len(values)
    assert {n: model.units[n] for n in values} == {n: DecisionUnit(n, v * 4, None, 4) for n, v in values.items()}


def test_layers_that_are_not_listed_are_parameters_and_halves_are_of_two_bytes() -> None:
    specs = layer_specs(Net().bfloat16())
    model = CandidateModel(specs, ["head"])
    assert model.units["fc.weight"] == DecisionUnit("fc.weight", 2400 * 2, None, 2)
    assert model.units["head"] == DecisionUnit("head", 1200 * 2, (30, 40), 2)
    assert sum(u.nbytes for u in model.units.values()) == sum(s.nbytes for s in specs)
    assert model_of(nn.Linear(3, 2)).units == {"": DecisionUnit("", 32, (2, 3), 4)}


def test_a_unit_is_in_the_bucket_of_its_first_parameter() -> None:
    names = ("scale", "head.weight", "fc.bias"), ("fc.weight",), ("norm.bias", "norm.weight")
    f = dataclasses.replace(NO_FIGURES, ready=(1.0, 2.0, 3.0), buckets=names, end=4.0, seen={"fc": 0.5})
    buckets = Bucket(1.0, ("scale", "head", "fc")), Bucket(2.0, ()), Bucket(3.0, ("norm.bias", "norm.weight"))
    assert model_of(Net()).seen(f) == TrainingPass(buckets, {"fc": 0.5}, 4.0)


@st.composite
def bound_by_transfers(draw: st.DrawFn) -> Case:
    """All is ready within a fifth of the time that the transfers take."""
    sizes = draw(st.lists(st.integers(1, 1000), min_size=1, max_size=4))
    link = Link(4, AlphaBeta(draw(st.floats(0, 1e-2)), draw(st.floats(1e-6, 1e-3))), AlphaBeta(0, 0))
    seconds = sum(link.all_reduce.seconds(1.5 * 4 * n) for n in sizes)
    ready = sorted(draw(st.lists(st.floats(0, 0.2), min_size=len(sizes), max_size=len(sizes))))
    buckets = tuple(Bucket(t * seconds, (str(i),)) for i, t in enumerate(ready))
    return chain(sizes), TrainingPass(buckets, {}, 0.2 * seconds), link


@given(bound_by_transfers(), st.floats(0.3, 3.5))
def test_a_link_that_the_probe_saw_too_fast_or_slow_is_put_right(case: Case, factor: float) -> None:
    model, p, link = case
    span = all_dense(model, p, link.slower(factor))
    found, missing_s = model.calibrate(p, span, link)
    assert found == pytest.approx(factor, rel=0.02 if found == 1 else 0.01)  # 1 unless a hundredth of the step shows
    assert missing_s == pytest.approx(0, abs=0.01 * span)


@given(bound_by_transfers(), st.floats(1, 5), st.floats(0, 5))
def test_a_calibrated_dense_step_takes_what_it_took(case: Case, longer: float, share: float) -> None:
    model, p, link = case
    p, span = dataclasses.replace(p, end=longer * p.end), share * all_dense(model, p, link)
    factor, missing_s = model.calibrate(p, span, link)
    assert 1 / 8 <= factor <= 8
    assert all_dense(model, p, link.slower(factor), missing_s) == pytest.approx(span)


@pytest.mark.parametrize("span", [10.0, 9.5, 10.5, 12.0])
def test_a_transfer_that_hides_behind_the_backward_pass_says_nothing_about_the_link(span: float) -> None:
    assert chain([250]).calibrate(TrainingPass((Bucket(1.0, ("0",)),), {}, 10.0), span, ONE_S) == (1.0, span - 10)


@pytest.mark.parametrize(("span", "factor", "missing_s"), [(12.0, 8, 3), (0.5, 1 / 8, -0.625)])
def test_what_no_likely_link_explains_is_left_over(span: float, factor: float, missing_s: float) -> None:
    found = chain([250]).calibrate(TrainingPass((Bucket(1.0, ("0",)),), {}, 1.0), span, ONE_S)
    assert found == pytest.approx((factor, missing_s))


def chosen(**changes: Any) -> RouteChoice:
    """For the net on a slow link, where ``fc`` had three rows, which pay; what else is known, and how it is changed."""
    known: dict[str, Any] = {"rows": {"fc": 3, "head": 3}, "arithmetic": "avx", "products": {"fc": (1e-5, 2e-5)}}
    known |= {"codecs": {}, "barred": {}, "missing_s": 0.0, **changes}
    model = model_of(Net())
    ready, names = (0.002, 0.003), (("head.weight", "scale"), ("fc.weight", "fc.bias"))
    f = Measurements(2, 0.01, 0.0, ready, names, 0.003, {"fc": 0.001}, known["rows"], arithmetic=known["arithmetic"])
    costs = known["products"], known["codecs"]
    return model.choose(model.seen(f), f, SLOW, *costs, known["barred"], known["missing_s"])


def test_rows_that_pay_are_chosen_at_the_price_of_their_layer() -> None:
    choice = chosen()
    assert choice.ways["fc"] == factors(40, 60, 3, SLOW, local_s=1e-5, rebuild_s=2e-5)
    assert routes(choice, {}) == {"fc": "factors"}
    assert choice.seconds < choice.dense_s
    assert "dense would cost" in choice.reasons["fc"]


@pytest.mark.parametrize(
    ("changes", "unit", "reason"),
    [
        ({}, "scale", "has no other exact way"),
        ({"barred": {"fc": "lost in practice"}}, "fc", "lost in practice"),
        ({"arithmetic": "", **NOT_FOR_OWNERS}, "fc", "ranks with unlike CPUs, threads or versions"),
        ({"rows": {"head": 3}}, "fc", "its rows were not seen"),
        ({"products": {}}, "fc", "the products of its rows were not measured"),
        ({"rows": {"fc": 300, "head": 3}}, "fc", "300 rows a rank are more bytes than the gradient"),
        ({"products": {"fc": (0.0, 1.0)}, **NOT_FOR_OWNERS}, "fc", "factors would cost 1e+03 ms"),
    ],
)
def test_a_unit_that_stays_dense_says_why(changes: dict[str, Any], unit: str, reason: str) -> None:
    choice = chosen(**changes)
    assert choice.ways[unit].route == "dense"
    assert choice.reasons[unit].startswith(reason)


@pytest.mark.parametrize("changes", [{"arithmetic": ""}, {"products": {"fc": (1e-5, 1.0)}}])
def test_owners_are_chosen_where_ranks_are_unlike_or_all_rows_would_be_long_to_multiply(
    changes: dict[str, Any],
) -> None:
    choice = chosen(**changes)
    assert choice.ways["fc"] == owners(40, 60, 3, SLOW, local_s=1e-5)
    assert routes(choice, {}) == {"fc": "owners"}


def test_what_is_missing_is_added_to_both_predictions() -> None:
    plain, more = chosen(), chosen(missing_s=0.5)
    assert (more.dense_s, more.seconds) == pytest.approx((plain.dense_s + 0.5, plain.seconds + 0.5))
    assert more.ways == plain.ways


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 300), st.integers(1, 9))
def test_products_are_measured_where_rows_are_fewer_bytes(n: int, m: int, rows: int, world: int) -> None:
    model = model_of(nn.Sequential(nn.Linear(m, n, bias=False, device="meta"), nn.LayerNorm(3)))
    fewer = world > 1 and rows < volume.crossover_rows(m, n, world, world) * (1 - 1e-12)
    fewer |= sum(owners_sent(n, m, rows, world)) < 2 * (world - 1) / world * 4 * n * m
    assert model.worth_measuring({"0": rows, "1.weight": 0, "gone": 0}, world) == ({"0": (n, m, rows)} if fewer else {})


def test_routes_are_in_the_order_of_the_backward_pass_and_gains_in_that_of_seconds() -> None:
    dense = {n: Candidate("dense", 0, seconds, 0) for n, seconds in {"a": 9, "b": 9, "c": 9, "d": 9}.items()}
    rows = {n: Candidate("factors", 0, seconds, 0, early=True) for n, seconds in {"a": 3, "b": 1, "c": 2}.items()}
    choice = RouteChoice({**dense, **rows}, dense, {}, 0.0, 0.0)
    assert list(routes(choice, {"a": 2.0, "b": 3.0, "c": 1.0})) == ["c", "a", "b"]
    assert by_gain(choice) == ["b", "c", "a"]


def with_servers(line: AlphaBeta | None) -> RouteChoice:
    """For the net on a slow link; of its layers only ``fc.weight`` and ``head`` are large enough for servers."""
    specs = layer_specs(Net())
    plan = make_plan(specs, "push_pull", world=4, min_size=1000)
    model = CandidateModel(specs, linear_layers(Net()), served=plan)
    ready, names = (0.002, 0.003), (("head.weight", "scale"), ("fc.weight", "fc.bias"))
    f = Measurements(2, 0.01, 0.0, ready, names, 0.003, {}, {})
    return model.choose(model.seen(f), f, dataclasses.replace(SLOW, push_pull=line), {}, {}, {}, 0.0)


def test_servers_are_chosen_where_their_line_is_shorter_at_the_price_of_what_stays_dense_beside() -> None:
    fast = AlphaBeta(1e-4, 0.75e-7)  # half as long for each byte of gradient: an all-reduce sends 1.5 of each
    choice = with_servers(fast)
    assert routes(choice, {}) == {"head": "push_pull", "fc": "push_pull"}
    link = dataclasses.replace(SLOW, push_pull=fast)
    assert choice.ways["head"] == push_pull(4800, link)
    assert choice.ways["fc"] == push_pull(9600, link, plain=160)
    assert choice.ways["scale"].route == "dense"
    assert choice.seconds < 0.9 * choice.dense_s


@pytest.mark.parametrize("line", [None, AlphaBeta(1e-4, 1.5e-7), AlphaBeta(5e-3, 0.75e-7)])
def test_servers_that_were_not_measured_or_win_nothing_are_left_alone(line: AlphaBeta | None) -> None:
    assert routes(with_servers(line), {}) == {}
