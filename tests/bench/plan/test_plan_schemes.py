"""Steps on paper: by hand, against the timeline's recursion, and what holds for any model and setting."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.bench.plan.assumptions import RANKS, Assumptions, parse_ranks
from commlib.bench.plan.known_models import known
from commlib.bench.plan.model import LayeredModel, ModelLayer, plain
from commlib.bench.plan.schemes import (
    BUCKET,
    BYTES,
    FIRST_BUCKET,
    SCHEMES,
    SchemeOutcome,
    alone_s,
    buckets,
    crossover,
    one_pass,
    outcomes,
)
from commlib.planning.cost import volume
from commlib.planning.cost.overlap import step_seconds
from tests.support.tiers import examples


def conv(name: str, parameters: int, flops: int) -> ModelLayer:
    return ModelLayer(name, "conv", parameters, flops)


def fc(name: str, m: int, n: int, rows: int) -> ModelLayer:
    return ModelLayer(name, "linear", m * n + n, 2 * m * n * rows, m, n, rows)


def model(*layers: ModelLayer) -> LayeredModel:
    return LayeredModel("made up", layers, "", 1)


SIZES = st.integers(1, 30_000_000)
LAYERS = st.lists(
    st.one_of(
        st.builds(conv, st.just("c"), SIZES, st.integers(1, 10**10)),
        st.builds(fc, st.just("f"), st.integers(1, 8192), st.integers(1, 8192), st.integers(1, 600)),
    ),
    min_size=1,
    max_size=8,
).map(lambda found: model(*(dataclasses.replace(x, name=f"{x.name}{i}") for i, x in enumerate(found))))
SETTINGS = st.builds(
    Assumptions,
    gbit=st.floats(0.01, 1000),
    latency_us=st.one_of(st.just(0.0), st.floats(0.1, 1000)),
    tflops=st.floats(0.01, 1000),
    batch=st.integers(1, 512),
)
MANY = st.integers(2, 4096)


def by_scheme(m: LayeredModel, setting: Assumptions, ranks: int) -> dict[str, SchemeOutcome]:
    return {o.scheme: o for o in outcomes(m, setting, ranks)}


@given(LAYERS, SETTINGS, MANY)
def test_no_scheme_is_faster_than_ideal_and_auto_is_never_slower_than_dense(
    m: LayeredModel, s: Assumptions, p: int
) -> None:
    found = by_scheme(m, s, p)
    assert list(found) == list(SCHEMES)
    assert all(0 < o.speedup <= p * (1 + 1e-9) for o in found.values())
    assert found["auto"].step_s <= found["dense"].step_s
    assert found["dense"].step_s <= found["no overlap"].step_s * (1 + 1e-12)


@given(LAYERS, SETTINGS, MANY, st.floats(1, 100))
def test_more_bandwidth_is_never_slower(m: LayeredModel, s: Assumptions, p: int, times: float) -> None:
    slow, fast = by_scheme(m, s, p), by_scheme(m, dataclasses.replace(s, gbit=s.gbit * times), p)
    for scheme in set(SCHEMES) - {"auto"}:  # auto may be content with a little less
        assert fast[scheme].step_s <= slow[scheme].step_s * (1 + 1e-9)


@given(LAYERS, SETTINGS)
def test_one_rank_is_one(m: LayeredModel, s: Assumptions) -> None:
    for o in outcomes(m, s, 1):
        assert o.speedup == 1.0
        assert o.sent == 0
        assert o.changed == ()


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(BUCKET // BYTES, 10**8), st.integers(1, 10**11)), min_size=1, max_size=8), MANY)
def test_with_a_layer_a_bucket_dense_is_wait_free_backpropagation(made: list[tuple[int, int]], p: int) -> None:
    m = model(*(conv(f"c{i}", size, flops) for i, (size, flops) in enumerate(made)))
    s = Assumptions(gbit=7.0, latency_us=3.0, tflops=2.0, batch=5)
    forward = [5 * x.flops / 2e12 for x in m.layers]
    wire = [2 * (p - 1) * 3e-6 + 8 * 4 * x.parameters * 2 * (p - 1) / p / 7e9 for x in m.layers]
    expected = step_seconds(sum(forward), [2 * f for f in forward], wire)
    found = by_scheme(m, s, p)
    assert found["dense"].step_s == pytest.approx(expected)
    assert found["no overlap"].step_s == pytest.approx(3 * sum(forward) + sum(wire))


def test_factors_of_one_layer_by_hand() -> None:
    layer = fc("fc", 1000, 500, 1)
    s, p = Assumptions(gbit=1.0, latency_us=0.0, tflops=1.0, batch=10), 4
    gradient = 10 * layer.flops / 1e12  # of the weight; the forward pass and the input's take as long
    transfer = 3 * (16 + 10 * 1500 * 4) * 8e-9
    found = by_scheme(model(layer), s, p)["factors"]
    # The rows leave when the backward pass begins; then every rank multiplies all ranks' rows.
    assert found.step_s == pytest.approx(max(2 * gradient, gradient + transfer) + p * gradient)
    assert found.sent == 3 * (16 + 10 * 1500 * 4)


def test_the_product_of_all_rows_takes_the_gpus_time() -> None:
    m = model(conv("conv", 10, 10**9), fc("fc", 1000, 1000, 1))
    s = Assumptions(gbit=100_000.0, latency_us=0.0, tflops=1.0, batch=100)
    found = by_scheme(m, s, 8)["factors"]
    gradient = 100 * 2e6 / 1e12
    assert found.step_s == pytest.approx(alone_s(m, s) + 7 * gradient, rel=1e-3)


def test_owners_of_one_layer_by_hand() -> None:
    layer = fc("fc", 500, 1000, 1)
    s, p = Assumptions(gbit=1.0, latency_us=0.0, tflops=1.0, batch=10), 4
    gradient = 10 * layer.flops / 1e12
    rows, blocks = 3 * (16 + 10 * (500 + 250) * 4), 3 * 500 * 250 * 4
    found = by_scheme(model(layer), s, p)["owners"]
    # The rows leave when the backward pass begins, the block with the bucket; its product is as long as a local one.
    assert found.step_s == pytest.approx(max(2 * gradient, gradient + rows * 8e-9) + blocks * 8e-9 + gradient)
    assert found.sent == rows + blocks


def test_auto_takes_owners_where_a_tall_layer_has_rows_that_are_long_to_multiply() -> None:
    layer = fc("head", 1000, 100_000, 1)  # K between M/(P − 1) and NM/(PM + N)
    slow = Assumptions(gbit=10.0, tflops=0.1, batch=512)
    found = by_scheme(model(layer), slow, 8)
    assert found["auto"].ways["head"].route == "owners"
    assert found["auto"].step_s == found["owners"].step_s < found["factors"].step_s


def test_adam_waits_for_the_owner() -> None:
    layer = fc("fc", 4096, 4096, 1)
    s, p = Assumptions(gbit=1.0, latency_us=5.0, tflops=100_000.0, batch=32), 8
    moved = 4 * volume.adam_colocated(volume.FactorableShape(4096, 4096, 32, p, p))
    assert moved == 4 * 119_275_520
    found = by_scheme(model(layer), s, p)["adam"]
    assert found.step_s == pytest.approx(moved * 8e-9 + 10e-6, rel=1e-3)


def test_the_crossover_is_the_cost_codes() -> None:
    assert [round(crossover(fc("fc", 4096, 4096, 1), p)) for p in (8, 16, 32)] == [512, 256, 128]
    assert crossover(fc("fc", 3, 4, 1), 1) == math.inf


@given(LAYERS)
def test_every_layer_with_parameters_is_in_one_bucket_in_reverse_order(m: LayeredModel) -> None:
    made = list(buckets(m.layers))
    assert [n for names in made for n in names] == [x.name for x in reversed(m.layers)]
    size = {x.name: BYTES * x.parameters for x in m.layers}
    for i, names in enumerate(made):
        limit = BUCKET if i else FIRST_BUCKET
        assert sum(size[n] for n in names[:-1]) < limit
        assert i == len(made) - 1 or sum(size[n] for n in names) >= limit


def test_layers_without_parameters_compute_and_are_in_no_bucket() -> None:
    m = model(
        plain("table", "embedding", [(100, 8)]), ModelLayer("attention", "attention", 0, 10**9), fc("fc", 8, 8, 1)
    )
    p = one_pass(m, Assumptions(tflops=1.0, batch=1))
    assert [b.layers for b in p.buckets] == [("fc", "table")]
    assert p.end == pytest.approx(3 * m.flops / 1e12)
    assert p.rows == {"fc": pytest.approx(m.flops / 1e12)}


def test_vgg19_leaves_dense_at_10_gbit_and_not_on_a_fast_link() -> None:
    slow, fast = by_scheme(known("vgg19"), Assumptions(), 8), by_scheme(known("vgg19"), Assumptions(gbit=10_000.0), 8)
    assert "classifier.0" in slow["auto"].changed
    assert fast["auto"].changed == ()
    assert slow["auto"].ways["classifier.0"].route == "factors"


def test_factors_never_pay_for_a_transformers_positions() -> None:
    found = by_scheme(known("bert-large"), Assumptions(batch=8), 16)
    assert found["factors"].step_s > found["dense"].step_s
    assert all(name == "pooler.dense" for name in found["auto"].changed)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gbit": 0.0}, "--gbit must be more than 0"),
        ({"gbit": -1.0}, "--gbit must be more than 0.*got -1"),
        ({"gbit": math.inf}, "--gbit must be more than 0, from 1e-06 to 100000.*got inf"),
        ({"gbit": 1e-300}, "--gbit must be more than 0, from 1e-06"),
        ({"gbit": math.nan}, "--gbit .*got nan"),
        ({"tflops": 0.0}, "--tflops must be more than 0"),
        ({"tflops": math.nan}, "--tflops .*got nan"),
        ({"latency_us": -1.0}, "--latency-us must be from 0"),
        ({"latency_us": math.inf}, "--latency-us must be from 0"),
        ({"latency_us": math.nan}, "--latency-us .*got nan"),
        ({"batch": 0}, "--batch must be from 1"),
        ({"batch": 10**7}, "--batch must be from 1"),
    ],
)
def test_a_setting_out_of_range_is_named(options: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Assumptions(**options)  # type: ignore[arg-type]


def test_numbers_of_ranks() -> None:
    assert parse_ranks(None) == parse_ranks([]) == RANKS
    assert parse_ranks(["8,2", "4096", " 2"]) == (2, 8, 4096)


@pytest.mark.parametrize("text", ["0", "-1", "4097", "2,,4", "two", "1e3", "2.5", ""])
def test_a_number_of_ranks_that_there_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"--ranks .*from 1 to 4096.*got"):
        parse_ranks([text])
