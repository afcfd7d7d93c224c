"""qsgd: random levels of the norm."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from commlib.codecs.base import LayerSpec
from commlib.compressors.qsgd import QSGD
from tests.support.hypothesis_strategies import GOLDEN, draws, encode, fields_of, floats_of, roundtrip, tensors
from tests.support.tiers import examples


def exact_variance(x: torch.Tensor, levels: int) -> float:
    """‖x‖²/s²·Σ f(1 − f), f the fractional part of s|x|/‖x‖."""
    values = [float(v) for v in x]
    norm = math.sqrt(sum(v * v for v in values))
    fractions = [levels * abs(v) / norm % 1 for v in values]
    return norm**2 / levels**2 * sum(f * (1 - f) for f in fractions)


def test_golden_variance_is_8_45() -> None:
    assert exact_variance(GOLDEN, 1) == pytest.approx(8.45, abs=0.005)


@pytest.mark.parametrize("levels", [1, 2, 7, 100])
def test_unbiased_with_the_exact_variance(levels: int) -> None:
    n = 2000
    found = draws(QSGD(levels), GOLDEN, n)
    wanted = exact_variance(GOLDEN, levels)
    assert torch.allclose(found.mean(0), GOLDEN.double(), atol=6 * math.sqrt(wanted / n))
    assert float((found - GOLDEN).square().sum(1).mean()) == pytest.approx(wanted, rel=0.12)


@pytest.mark.parametrize("levels", [1, 3, 7, 64])
def test_variance_is_within_omega(levels: int) -> None:
    for x in (torch.ones(64), torch.arange(64.0), torch.eye(64)[5] + 0.01):
        omega = min(64 / levels**2, math.sqrt(64) / levels)
        assert exact_variance(x, levels) <= omega * float(x.square().sum()) * (1 + 1e-6)


@pytest.mark.parametrize(("levels", "width"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (127, 8), (32767, 16)])
def test_payload_is_norms_then_levels_in_the_fewest_bits(levels: int, width: int) -> None:
    assert width == math.ceil(math.log2(2 * levels + 1))
    x = torch.randn(77, generator=torch.Generator().manual_seed(2))
    codec = QSGD(levels, block=20)
    payload = encode(codec, x, seed=9)
    assert payload.numel() == 4 * 4 + math.ceil(77 * width / 8)
    norms = floats_of(payload[:16])
    assert norms == pytest.approx([float(p.double().norm()) for p in x.split(20)], rel=1e-6)
    decoded = roundtrip(codec, x, seed=9).tolist()
    for i, code in enumerate(fields_of(payload[16:], 77, width)):
        level, share = code - levels, float(x[i]) / norms[i // 20] * levels
        assert math.floor(abs(share)) <= abs(level) <= math.floor(abs(share)) + 1
        assert level * float(x[i]) >= 0
        assert decoded[i] == pytest.approx(level / levels * norms[i // 20], rel=1e-6)


@settings(max_examples=examples(40))
@given(tensors())
def test_error_is_below_one_level_of_the_norm(x: torch.Tensor) -> None:
    error = (roundtrip(QSGD(7, block=50), x).double() - x).view(-1).abs()
    for part, e in zip(x.view(-1).double().split(50), error.split(50), strict=True):
        assert (e <= part.norm() / 7 * (1 + 1e-5) + 1e-44).all()


def test_zero_norm_gives_zeros() -> None:
    x = torch.zeros(1000)
    x[700] = 5.0
    decoded = roundtrip(QSGD(block=512), x)
    assert torch.equal(decoded, x)


def test_default_is_half_a_byte_a_value() -> None:
    assert QSGD().nbytes(LayerSpec("w", (512, 128))) == 32768 + 4 * 128
