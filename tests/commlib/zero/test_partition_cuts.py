"""Who owns what: every value once, in a row of memory, and as many bytes as an all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.codecs.registry import make
from commlib.errors import CommlibError
from commlib.exchange.buffers import Packing
from commlib.planning.policy import Exact
from commlib.planning.route import Route
from commlib.runtime.layers import LayerSpec
from commlib.zero.bucket_order import BucketOrder, heard, said, sum_of_squares
from commlib.zero.partition import NBYTES, buckets_of, plan_of, rows_of, wire_bytes

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6)


def specs_of(shapes: list[tuple[int, ...]]) -> list[LayerSpec]:
    return [LayerSpec(f"layer{i}", shape) for i, shape in enumerate(shapes)]


@given(SHAPES, st.integers(1, 7), st.sampled_from(["none", "onebit", "int8", "topk:ratio=0.5"]), st.integers(1, 400))
def test_every_value_has_one_owner_and_every_layer_one_place(
    shapes: list[tuple[int, ...]], world: int, codec: str, nbytes: int
) -> None:
    plan = plan_of(specs_of(shapes), codec, world=world, min_size=8)
    buckets = buckets_of(plan, nbytes)
    names = [cut.spec.name for cuts in buckets for cut in cuts]
    assert names == [f"layer{i}" for i in reversed(range(len(shapes)))]
    for cuts in buckets:
        assert len(cuts) == 1 or sum(c.spec.nbytes for c in cuts) <= nbytes
        for cut in cuts:
            owned = [cut.owned(rank, world) for rank in range(world)]
            assert [i for part in owned for i in range(part.start, part.stop)] == list(range(cut.spec.numel))
        assert [len(p.lengths) for p in rows_of(cuts, world)] == [len(cuts)] * world


@given(st.integers(1, 50), st.integers(1, 50), st.integers(2, 8))
def test_what_is_not_compressed_is_shared_out_to_within_a_value_and_costs_an_all_reduce(
    rows: int, columns: int, world: int
) -> None:
    plan = plan_of([LayerSpec("weight", (rows, columns))], "none", world=world, min_size=0)
    (cuts,) = buckets_of(plan)
    sizes = [part.stop - part.start for part in (cuts[0].owned(rank, world) for rank in range(world))]
    assert max(sizes) - min(sizes) <= 1
    even = [LayerSpec("weight", (rows * world * 2, columns))]
    buckets = buckets_of(plan_of(even, "none", world=world, min_size=0))
    for rank in range(world):
        assert wire_bytes(buckets, rank, world) == 2 * (world - 1) * even[0].nbytes // world


def test_a_codec_pays_on_the_way_to_owners_only() -> None:
    spec = LayerSpec("weight", (64, 64))
    coded = buckets_of(plan_of([spec], "onebit", world=2, min_size=0))
    half = Packing([make("onebit").nbytes(spec.row_slice(0, 32))]).total
    assert wire_bytes(coded, 0, 2) == half + spec.nbytes // 2


def test_kinds_that_cannot_travel_together_do_not() -> None:
    specs = [LayerSpec("a", (4,)), LayerSpec("b", (4,), torch.bfloat16), LayerSpec("c", (4,))]
    found = buckets_of(plan_of(specs, "none", world=2, min_size=0), NBYTES)
    assert [[c.spec.name for c in cuts] for cuts in found] == [["c", "a"], ["b"]]


def test_rules_that_cannot_be_are_told() -> None:
    spec = [LayerSpec("a", (4, 4))]
    elsewhere: list[Any] = ["onebit@gather", Route("gather", make("onebit"))]
    for rule in elsewhere:
        with pytest.raises(ValueError, match="no other exchange: name a codec alone"):
            plan_of(spec, rule, world=2, min_size=0)
    chosen: list[Any] = [Exact(), "auto", plan_of(spec, "none", world=2, min_size=0)]
    for rule in chosen:
        with pytest.raises(TypeError, match="name a codec"):
            plan_of(spec, rule, world=2, min_size=0)
    with pytest.raises(ValueError, match="cannot re-encode"):
        plan_of(spec, "powersgd:rank=1", world=2, min_size=0)
    rules: dict[str, Any] = {"a": make("onebit"), "*": Route("scatter_gather", make("int8"))}
    assert str(plan_of(spec, rules, world=2, min_size=0).layers["a"].route) == "onebit@scatter_gather"


@given(st.integers(0, 2**32))
def test_buckets_leave_in_their_order_whatever_comes_first(seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    buckets = [["a", "b"], ["c"], ["d", "e", "f"]]
    names = [name for names in buckets for name in names]
    arrivals = BucketOrder(buckets)
    for _ in range(2):
        left: list[int] = []
        there: set[str] = set()
        count = int(torch.randint(7, (), generator=drawn))
        come = [names[i] for i in torch.randperm(6, generator=drawn).tolist()[:count]]
        for name in come:
            there.add(name)
            left += arrivals.came(name)
            whole = [i for i in range(3) if all(there.issuperset(b) for b in buckets[: i + 1])]
            assert left == whole
        assert [*left, *arrivals.rest()] == [0, 1, 2]
        if come:
            with pytest.raises(CommlibError, match=r"no_sync\(\)"):
                arrivals.came(come[0])
        arrivals.reset()


def test_all_hear_the_same_verdict() -> None:
    used = torch.tensor([[1, 0, 0], [0, 0, 1], [1, 1, 1]], dtype=torch.uint8)
    one, two = said([torch.tensor([3.0]), torch.empty(0)], used[0]), said([torch.tensor([0.0, 4.0])], used[1])
    found = heard(torch.stack([one, two]))
    assert (found.finite, found.norm, found.used) == (True, 5.0, (True, False, True))
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not heard(torch.stack([one, said([torch.tensor([bad, 1.0])], used[2])])).finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_squares_that_overflow_their_dtype_are_added_in_double_precision(dtype: torch.dtype) -> None:
    large = torch.finfo(dtype).max if dtype != torch.float64 else 1e150
    found = sum_of_squares([torch.full((4,), large, dtype=dtype), torch.ones(3, dtype=dtype)])
    assert float(found) == pytest.approx(4 * large**2)
