"""ternary: TernGrad without clipping."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from commlib.codecs.base import LayerSpec
from commlib.compressors.ternary import Ternary
from tests.support.hypothesis_strategies import GOLDEN, draws, encode, floats_of, roundtrip, tensors


def test_golden_variance_is_4() -> None:
    found = draws(Ternary(), GOLDEN, 3000)
    assert float((found - GOLDEN).square().sum(1).mean()) == pytest.approx(4.0, rel=0.06)
    assert torch.allclose(found.mean(0), GOLDEN.double(), atol=6 * math.sqrt(2.25 / 3000))


@pytest.mark.parametrize("block", [0, 10])
def test_variance_is_absmax_times_l1_minus_energy(block: int) -> None:
    x = torch.randn(30, generator=torch.Generator().manual_seed(3))
    parts = x.double().split(block or 30)
    wanted = sum(float(p.abs().max() * p.abs().sum() - p.square().sum()) for p in parts)
    found = draws(Ternary(block), x, 2000)
    assert float((found - x).square().sum(1).mean()) == pytest.approx(wanted, rel=0.05)


def test_omega_is_reached_by_one_large_among_equal_small_values() -> None:
    d = 100
    small = 1 / (1 + math.sqrt(d))  # maximises (‖x‖∞‖x‖₁ − ‖x‖²)/‖x‖²
    x = torch.full((d,), small, dtype=torch.float64)
    x[0] = 1.0
    ratio = float((x.abs().sum() - x.square().sum()) / x.square().sum())
    assert ratio == pytest.approx((math.sqrt(d) - 1) / 2, rel=1e-6)


@given(tensors())
def test_every_value_is_zero_or_its_sign_times_the_largest(x: torch.Tensor) -> None:
    decoded = roundtrip(Ternary(), x)
    if x.numel():
        top = x.abs().max()
        assert torch.equal(decoded, torch.where(decoded == 0, 0.0, x.sign() * top))
        peak = x.abs() == top
        assert torch.equal(decoded[peak], x[peak])


def test_payload_is_maxima_then_five_digits_a_byte() -> None:
    x = torch.tensor([2.0, -2, 0, 2, 0, -2, -4, 0, 0, 0, 4, -4])
    payload = encode(Ternary(block=6), x, seed=1)
    assert payload.numel() == 8 + 3
    assert floats_of(payload[:8]) == [2.0, 4.0]
    assert payload[8:].tolist() == [2 + 3 * 0 + 9 * 1 + 27 * 2 + 81 * 1, 0 + 3 * 0 + 9 + 27 + 81, 2 + 3 * 0]
    assert torch.equal(roundtrip(Ternary(block=6), x, seed=1), x)


def test_1_6_bits_a_value() -> None:
    assert Ternary().nbytes(LayerSpec("w", (100, 1000))) == 20000 + 4
    assert Ternary(block=1000).nbytes(LayerSpec("w", (100, 1000))) == 20000 + 400
