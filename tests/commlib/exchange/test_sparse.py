"""``sparse``, all ranks in this process: rows are merged as torch adds dense gradients, to the same bits everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from commlib.codecs.base import LayerSpec, Memory, Seeds
from commlib.codecs.registry import make
from commlib.exchange.layer_task import LayerTask
from commlib.exchange.registry import EXCHANGES
from commlib.groups.world import World
from commlib.planning.planner import make_plan
from commlib.planning.route import Route, resolve
from commlib.planning.simulate import run
from commlib.runtime.layers import LayerSpec as Spec
from commlib.runtime.layers import layer_specs
from commlib.telemetry.stats import Meter

CPU = torch.device("cpu")
HEIGHT = 9
NOTHING = Memory({}, {})
ROWS = st.lists(st.lists(st.integers(0, HEIGHT - 1), max_size=12), min_size=1, max_size=4)
WIDTHS = [(3,), (1,), (2, 2), (0,)]
EVERYWHERE = ("none", "onebit", "fp16", "topk:ratio=0.1", "powersgd:rank=2", "factors", "dgc:ratio=0.1")
CODECS = ("fp16:ef=off", "bf16:ef=off", "int8:ef=off", "int4:ef=off", "qsgd", "ternary", "natural", "onebit:ef=off")


def spec(width: tuple[int, ...], dtype: torch.dtype = torch.float32) -> LayerSpec:
    return LayerSpec("table", (HEIGHT, *width), dtype, kind="embedding.weight", sparse=True)


def gradient(rows: list[int], of: LayerSpec, seed: int) -> Tensor:
    """Uncoalesced: a row may be there several times, and there may be none."""
    values = torch.randn(len(rows), *of.shape[1:], generator=torch.Generator().manual_seed(seed)).to(of.dtype)
    at = torch.tensor([rows], dtype=torch.int64).view(1, -1)
    return torch.sparse_coo_tensor(at, values, of.shape, check_invariants=True)


def exchanged(rule: str, grads: list[Tensor], of: LayerSpec, step: int = 0) -> tuple[list[Tensor], list[Meter]]:
    """Every rank's gradient after one step."""
    grads, meters = [g.clone() for g in grads], [Meter(CPU) for _ in grads]
    ways = []
    for rank, (grad, meter) in enumerate(zip(grads, meters, strict=True)):
        item = LayerTask(of, make(rule), grad, NOTHING, Seeds(0, step, of.name), meter, NOTHING)
        ways.append(EXCHANGES["sparse"].rounds([item], World(rank, len(grads)), None))
    run(ways)
    return grads, meters


def same(grads: list[Tensor]) -> bool:
    first = grads[0]
    return all(
        g.is_coalesced() and torch.equal(g.indices(), first.indices()) and torch.equal(g.values(), first.values())
        for g in grads
    )


@given(
    ROWS, st.sampled_from([(3,), (1,), (2, 2), (0,)]), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
)
def test_the_merge_is_the_dense_mean_and_has_just_the_rows_that_any_rank_has(
    rows: list[list[int]], width: tuple[int, ...], dtype: torch.dtype
) -> None:
    of = spec(width, dtype)
    grads = [gradient(r, of, i) for i, r in enumerate(rows)]
    found, meters = exchanged("none", grads, of)
    assert same(found)
    assert found[0].indices()[0].tolist() == sorted({i for r in rows for i in r})
    mean = torch.stack([g.to_dense().double() for g in grads]).mean(0)
    off = 1e-6 if dtype != torch.bfloat16 else 0.1
    torch.testing.assert_close(found[0].to_dense().double(), mean, atol=off, rtol=off)
    most = max(len(set(r)) for r in rows)
    plain = (len(rows) - 1) * (8 + most * (8 + math.prod(width) * dtype.itemsize))
    assert all(meter.dense() == plain for meter in meters)


@given(ROWS, st.sampled_from(CODECS), st.integers(0, 3))
def test_a_codec_without_memory_codes_the_values_alike_everywhere(rows: list[list[int]], rule: str, step: int) -> None:
    of = spec((16,))
    grads = [gradient(r, of, i) for i, r in enumerate(rows)]
    found, _ = exchanged(rule, grads, of, step)
    assert same(found)
    assert found[0].indices()[0].tolist() == sorted({i for r in rows for i in r})
    assert bool(found[0].values().isfinite().all())
    if rule in ("fp16:ef=off", "bf16:ef=off", "int8:ef=off"):
        mean = torch.stack([g.to_dense() for g in grads]).mean(0)
        torch.testing.assert_close(found[0].to_dense(), mean, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("rule", ["none", *CODECS])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_on_one_rank_comes_to_all(rule: str, value: float) -> None:
    of = spec((16,))
    grads = [gradient([1, 2], of, 0), gradient([2, 5], of, 1), gradient([], of, 2)]
    grads[1]._values()[1, 3] = value
    found, _ = exchanged(rule, grads, of)
    assert all(not bool(g.values().isfinite().all()) for g in found)


# -- which route --------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(200, 64, sparse=True), nn.Linear(64, 64)
        self.bag = nn.EmbeddingBag(100, 64, sparse=True)
        if options.get("tied"):
            self.out = nn.Linear(64, 200, bias=False)
            self.out.weight = self.table.weight
        if options.get("twice"):
            self.again = nn.Embedding(200, 64, sparse=True)
            self.again.weight = self.table.weight


def specs(**options: bool) -> list[Spec]:
    return layer_specs(Words(**options))


@pytest.mark.parametrize(
    "rule", ["none", "onebit", "fp16", "topk:ratio=0.1", "powersgd:rank=2", "factors", "dgc:ratio=0.1"]
)
def test_by_a_rule_for_all_layers_sparse_ones_stay_exact_and_the_plan_says_why(rule: str) -> None:
    plan = make_plan(specs(), rule, world=2, min_size=0)
    for name in ("table.weight", "bag.weight"):
        assert str(plan.layers[name].route) == str(plan.layers[name].dense) == "none@sparse"
        assert "its gradient is sparse: rows and values" in plan.layers[name].reason
    if rule in ("onebit", "fp16"):
        assert "give ef=off" in plan.layers["table.weight"].reason
    assert plan.layers["top.weight"].route.exchange != "sparse"
    assert "by batch" in str(plan)


def test_a_rule_gives_a_sparse_layer_its_codec_whatever_exchange_it_names() -> None:
    rules = {"table.weight": "int8:ef=off", "bag.*": "fp16:ef=off@gather", "*": "onebit"}
    plan = make_plan(specs(), rules, world=4, min_size=0)
    assert plan.layers["table.weight"].route == Route("sparse", make("int8:ef=off"))
    assert plan.layers["bag.weight"].route == Route("sparse", make("fp16:ef=off"))
    assert str(plan.layers["table.weight"].dense) == "none@sparse"
    assert resolve("int8:ef=off@sparse", 2) == Route("sparse", make("int8:ef=off"))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("onebit", "sparse rows are others in every step: give ef=off"),
        ("fp16", "sparse rows are others in every step: give ef=off"),
        ("dgc:ratio=0.1", "sparse rows are others in every step"),
        ("powersgd:rank=2", "sparse rows are others in every step"),
        ("randomk:ratio=0.1,ef=off", "its ranks draw the same values, and have other rows"),
    ],
)
def test_a_codec_that_keeps_something_is_refused_where_a_rule_names_the_layer(rule: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"rule 'table.weight': .* cannot carry a sparse gradient: .*{why}"):
        make_plan(specs(), {"table.weight": rule}, world=2, min_size=0)


def test_a_dense_gradient_does_not_go_by_sparse_nor_a_sparse_one_by_another() -> None:
    plan = make_plan(specs(), "none@sparse", world=2, min_size=0)
    assert str(plan.layers["top.weight"].route) == "none@dense"
    for exchange in set(EXCHANGES) - {"sparse"}:
        assert "its gradient is sparse" in str(Route(exchange, make("none")).refuse(spec((4,))))
    assert "not sparse" in str(Route("sparse", make("none")).refuse(LayerSpec("x", (4, 4))))
    with pytest.raises(ValueError, match="onebit cannot go over sparse: it keeps a memory"):
        resolve("onebit@sparse", 2)


def test_a_table_that_others_use_too_is_refused_and_one_that_only_sparse_ones_share_is_not() -> None:
    with pytest.raises(ValueError, match=r"table\.weight is of an embedding with sparse=True, and other modules"):
        specs(tied=True)
    (shared,) = [s for s in specs(twice=True) if s.name == "table.weight"]
    assert shared.sparse
