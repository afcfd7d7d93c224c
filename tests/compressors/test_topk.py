"""topk: the largest values and where they are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.codecs.base import LayerSpec, Memory
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.compressors.topk import TopK
from tests.support.hypothesis_strategies import GOLDEN, encode, floats_of, roundtrip, tensors
from tests.support.tiers import examples


def test_golden_vector() -> None:
    assert roundtrip(TopK(0.5), GOLDEN).tolist() == [-2.0, 0.0, 0.0, 3.0]


@settings(max_examples=examples(80))
@given(tensors(), st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0]))
def test_sends_exactly_the_k_largest(x: torch.Tensor, ratio: float) -> None:
    flat, decoded = x.view(-1).numpy(), roundtrip(TopK(ratio), x).view(-1).numpy()
    k = min(flat.size, max(1, math.ceil(ratio * flat.size)))
    sent = decoded != 0
    assert np.array_equal(decoded[sent], flat[sent])
    assert sorted(np.abs(decoded[sent])) == sorted(v for v in np.sort(np.abs(flat))[flat.size - k :] if v)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
def test_delta_holds_and_is_reached_by_equal_values(ratio: float) -> None:
    x = torch.ones(200)
    error = float((roundtrip(TopK(ratio), x) - x).square().sum()) / 200
    assert error == pytest.approx(1 - ratio)
    assert TopK(ratio).contraction(LayerSpec.of(x)) == pytest.approx(ratio)


def test_delta_with_lossy_values_is_their_share_of_it() -> None:
    spec = LayerSpec("w", (10000,))
    assert TopK(0.1, "fp16").contraction(spec) is None
    assert TopK(0.1, "int4").contraction(spec) == pytest.approx(0.1 * 196 / (196 + 127))
    assert TopK(0.1, "qsgd").contraction(spec) is None


def test_ties_are_resolved_alike() -> None:
    x = torch.ones(5000)
    assert torch.equal(encode(TopK(0.1), x), encode(TopK(0.1), x.clone()))
    assert roundtrip(TopK(0.1), x).sum() == 500


def test_values_come_first_in_the_order_of_their_places() -> None:
    payload = encode(TopK(0.5), torch.tensor([0.0, 5.0, 1.0, -7.0, 0.0, 6.0]))
    assert floats_of(payload[:12]) == [5.0, -7.0, 6.0]


@pytest.mark.parametrize(
    ("values", "bytes_a_value"), [("fp32", 4.0), ("none", 4.0), ("fp16", 2), ("bf16", 2), ("int8", 1), ("int4", 0.5)]
)
def test_size_is_the_values_and_about_2_plus_log_bits_an_index(values: str, bytes_a_value: float) -> None:
    n, ratio = 1_000_000, 0.01
    index_bits = 8 * (TopK(ratio, values).nbytes(LayerSpec("w", (n,))) / (n * ratio) - bytes_a_value)
    assert 2 + math.log2(1 / ratio) - 0.6 < index_bits < 2 + math.log2(1 / ratio) + (0.3 if "int" in values else 0)


def test_lossy_values_equal_that_codec_on_the_values_alone() -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(4))
    decoded = roundtrip(TopK(0.1, "int8:block=50"), x)
    exact = roundtrip(TopK(0.1), x)
    places = exact != 0
    part = exact[places]
    scale = torch.stack([p.abs().max() for p in part.split(50)]).repeat_interleave(50)
    assert torch.equal(decoded != 0, places)
    assert ((decoded[places] - part).abs() <= scale / 254 * (1 + 1e-5)).all()


@pytest.mark.parametrize(("values", "exact"), [("fp32", True), ("int4", False)])
def test_feedback_keeps_what_was_not_sent(values: str, exact: bool) -> None:
    x = torch.randn(400, generator=torch.Generator().manual_seed(5))
    codec = ErrorFeedback(TopK(0.1, values))
    memory = Memory.zeros(codec, LayerSpec.of(x))
    decoded = roundtrip(codec, x, memory=memory)
    residual = memory.new["residual"]
    assert torch.allclose(decoded + residual, x, atol=1e-6)
    assert bool((residual[decoded != 0] == 0).all()) is exact


def test_is_random_only_if_its_values_are() -> None:
    assert not TopK().random
    assert TopK(values="qsgd").random
    assert TopK() == TopK(values="fp32")
    assert TopK().default_exchange == "gather"


@settings(max_examples=examples(60))
@given(st.integers(1, 500), st.integers(1, 60), st.sampled_from([0.01, 0.1, 0.5, 1.0]), st.integers(0, 2**31))
def test_chunks_send_what_topk_sends_of_each(n: int, chunk: int, ratio: float, seed: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)).mul(2).round()  # with ties
    alone = [roundtrip(TopK(ratio), part) for part in x.split(chunk)]
    assert torch.equal(roundtrip(TopK(ratio, chunk=chunk), x), torch.cat(alone))


def test_chunks_of_what_is_carried_leave_what_was_not_sent() -> None:
    codec, g = ErrorFeedback(TopK(0.25, chunk=4)), torch.tensor([1.0, 2, 3, 4, 8, 7, 6, 5, 1])
    memory = Memory.zeros(codec, LayerSpec.of(g))
    payload = torch.empty(codec.nbytes(LayerSpec.of(g)), dtype=torch.uint8)
    codec.compress(g, payload, memory=memory)
    assert memory.new["residual"].tolist() == [1, 2, 3, 0, 0, 7, 6, 5, 0]


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_chunk_sends_what_is_not_finite_first(value: float) -> None:
    x = torch.arange(1.0, 101)
    x[42] = value
    decoded = roundtrip(TopK(0.1, chunk=10), x)
    assert not decoded[42].isfinite()
    assert decoded[decoded.isfinite()].count_nonzero() == 9
