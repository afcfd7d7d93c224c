"""onebit: CNTK's zero-threshold quantiser."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from commlib.codecs.base import LayerSpec, Memory
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.compressors.onebit import OneBit
from tests.support.hypothesis_strategies import GOLDEN, bits_of, decode, encode, floats_of, roundtrip, tensors


def naive(values: list[float], column: int) -> tuple[list[float], list[int], list[float]]:
    """(means, bits, decoded) by the definition, in doubles."""
    means, bits, decoded = [], [], []
    for start in range(0, len(values), column):
        part = values[start : start + column]
        low, high = [v for v in part if v < 0], [v for v in part if v >= 0]
        pair = [math.fsum(side) / len(side) if side else 0.0 for side in (low, high)]
        means += pair
        bits += [int(v >= 0) for v in part]
        decoded += [pair[v >= 0] for v in part]
    return means, bits, decoded


@pytest.mark.parametrize("axis", ["column", "tensor"])
def test_golden_vector_and_its_residual(axis: str) -> None:
    assert roundtrip(OneBit(axis), GOLDEN).tolist() == [-1.5, -1.5, 1.5, 1.5]
    codec = ErrorFeedback(OneBit(axis))
    memory = Memory.zeros(codec, LayerSpec.of(GOLDEN))
    encode(codec, GOLDEN, memory=memory)
    assert memory.new["residual"].tolist() == [-0.5, 0.5, -1.5, 1.5]


def test_golden_payload() -> None:
    assert encode(OneBit(), GOLDEN).numpy().tobytes().hex() == "0000c0bf" + "0000c03f" + "0c"


@pytest.mark.parametrize(
    ("shape", "column"),
    [((600,), 256), ((2, 300), 300), ((9, 100), 300), ((5, 3, 7, 7), 294), ((4, 256), 256), ((1, 1000), 1000), ((), 1)],
)
def test_a_column_is_a_row_or_enough_short_rows(shape: tuple[int, ...], column: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    means, bits, decoded = naive(x.view(-1).tolist(), column)
    payload = encode(OneBit(), x)
    assert floats_of(payload[: 4 * len(means)]) == pytest.approx(means, rel=1e-5)
    assert bits_of(payload[4 * len(means) :])[: len(bits)] == bits
    assert roundtrip(OneBit(), x).view(-1).tolist() == pytest.approx(decoded, rel=1e-5)


@given(tensors())
def test_tensor_axis_is_one_column(x: torch.Tensor) -> None:
    _, _, decoded = naive(x.view(-1).tolist(), max(1, x.numel()))
    expected = torch.tensor(decoded, dtype=torch.float64).float()
    assert torch.allclose(roundtrip(OneBit("tensor"), x).view(-1), expected, rtol=1e-4, atol=1e-44)


def test_an_empty_side_has_mean_zero_and_zero_counts_as_positive() -> None:
    payload = encode(OneBit(), torch.zeros(3))
    assert floats_of(payload[:8]) == [0.0, 0.0]
    assert bits_of(payload[8:])[:3] == [1, 1, 1]
    assert floats_of(encode(OneBit(), torch.tensor([-1.0, -3.0]))[:8]) == [-2.0, 0.0]


@pytest.mark.parametrize(
    "shape", [(16, 4096), (4096, 16), (512, 512), (65536,), (256, 257), (65536, 1), (100, 7, 10, 10)]
)
def test_shrinks_at_least_25_times_whatever_the_shape(shape: tuple[int, ...]) -> None:
    spec = LayerSpec("w", shape)
    assert spec.nbytes / OneBit().nbytes(spec) >= 25
    assert spec.nbytes / OneBit("tensor").nbytes(spec) >= 31


def test_stripes_cut_where_it_says_encode_alike() -> None:
    spec = LayerSpec("w", (40, 100))
    codec = OneBit()
    step = codec.stripe_rows(spec)
    x = torch.randn(spec.shape)
    whole = roundtrip(codec, x)
    for start in range(0, 40, step):
        stripe = x[start : start + step].contiguous()
        assert codec._column(LayerSpec.of(stripe)) >= stripe.numel()
        assert torch.equal(roundtrip(codec, stripe), whole[start : start + step])


def test_contraction_is_reached_by_one_value_in_a_column() -> None:
    x = torch.zeros(2, 300)
    x[1, 17] = 1.0
    error = float((roundtrip(OneBit(), x) - x).square().sum())
    delta = OneBit().contraction(LayerSpec.of(x))
    assert delta == 1 / 300
    assert error == pytest.approx(1 - delta, rel=1e-5)


@given(tensors(largest=1e15))
def test_energy_identity(x: torch.Tensor) -> None:
    """‖v − Q‖² = ‖v‖² − (n₀·val₀² + n₁·val₁²) for one column."""
    q = decode(OneBit("tensor"), encode(OneBit("tensor"), x), tuple(x.shape)).double()
    energy = x.double().square().sum()
    assert torch.allclose((x - q).square().sum(), energy - q.square().sum(), atol=float(1e-5 * energy) + 1e-80)
