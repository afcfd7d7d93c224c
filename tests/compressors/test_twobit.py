"""twobit: a sign and one of two magnitudes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.codecs.base import LayerSpec
from commlib.compressors.twobit import TwoBit
from tests.support.hypothesis_strategies import encode, floats_of, roundtrip, tensors
from tests.support.tiers import examples


def test_golden_vector() -> None:
    x = torch.tensor([1.0, -2.0, 3.0, -6.0])  # magnitudes' mean is 3
    assert roundtrip(TwoBit(4), x).tolist() == [1.5, -1.5, 4.5, -4.5]
    assert floats_of(encode(TwoBit(4), x)[:8]) == [1.5, 4.5]


def test_four_values_share_a_byte_and_each_block_has_two_means() -> None:
    assert TwoBit(64).nbytes(LayerSpec("w", (640,))) == 10 * 8 + 160
    assert TwoBit(64).nbytes(LayerSpec("w", (65,))) == 2 * 8 + 17
    assert TwoBit(64).nbytes(LayerSpec("w", (0,))) == 0


@settings(max_examples=examples(60))
@given(tensors(), st.sampled_from([1, 3, 64]))
def test_the_error_is_what_the_means_leave_of_the_squares(x: torch.Tensor, block: int) -> None:
    """That it is the mean is exact but for rounding: for one off by e, n values of it are off by 2·n·mean·e."""
    decoded = roundtrip(TwoBit(block), x).double().view(-1)
    x = x.double().view(-1)
    error, left = (decoded - x).square().sum(), x.square().sum() - decoded.square().sum()
    # a mean is a sum of up to ``block`` quotients, and a product: each off by half a subnormal step at most, or 2⁻²⁴
    subnormal = 2.0**-149 * (block + 1) * float(decoded.abs().sum())
    assert float(error) == pytest.approx(float(left), rel=1e-3, abs=1e-5 * float(x.square().sum()) + subnormal)


def test_a_block_of_equal_magnitudes_is_exact() -> None:
    x = torch.tensor([0.5, -0.5] * 50)
    assert torch.equal(roundtrip(TwoBit(), x), x)


@pytest.mark.parametrize("largest", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_shows_in_its_block_alone(largest: float) -> None:
    x = torch.ones(128)
    x[5] = largest
    decoded = roundtrip(TwoBit(64), x)
    assert not decoded[:64].isfinite().all()
    assert decoded[64:].tolist() == [1.0] * 64
