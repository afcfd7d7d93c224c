"""natural: random powers of two."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from commlib.codecs.base import LayerSpec
from commlib.compressors.natural import Natural
from tests.support.hypothesis_strategies import GOLDEN, draws, encode, floats_of, roundtrip, tensors


def test_golden_vector_only_three_moves_to_two_or_four() -> None:
    found = draws(Natural(), GOLDEN, 2000)
    assert torch.equal(found[:, :3], GOLDEN[:3].double().expand(2000, 3))
    assert set(found[:, 3].tolist()) == {2.0, 4.0}
    assert float(found[:, 3].mean()) == pytest.approx(3.0, abs=6 / math.sqrt(2000))


def test_variance_is_worst_at_four_thirds_and_one_eighth_there() -> None:
    def relative(m: float) -> float:  # of m in [1, 2), exactly
        return (m - 1) * (2 - m) / m**2

    assert max(relative(1 + i / 3000) for i in range(3000)) == pytest.approx(1 / 8)
    x = torch.full((500,), 4 / 3 * 2.0**-30)
    found = draws(Natural(), x, 100)
    assert float((found - x).square().sum(1).mean() / x.double().square().sum()) == pytest.approx(1 / 8, rel=0.02)


@given(tensors())
def test_every_value_becomes_a_power_of_two_next_to_it(x: torch.Tensor) -> None:
    decoded = roundtrip(Natural(), x).view(-1).double()
    if not x.numel():
        return
    top = float(x.abs().max())
    smallest = 2.0 ** (math.frexp(top)[1] - 1 - 125)
    for value, back in zip(x.view(-1).tolist(), decoded.tolist(), strict=True):
        if abs(value) >= smallest:
            low = 2.0 ** (math.frexp(value)[1] - 1) if value else 0.0
            assert abs(back) in ((low, 2 * low) if low != abs(value) else (low,))
        else:
            assert abs(back) in (0.0, smallest)
        assert back * value >= 0


def test_values_under_the_smallest_code_stay_unbiased() -> None:
    x = torch.tensor([1.0, *[0.25 * 2.0**-125] * 4000])
    decoded = roundtrip(Natural(), x)[1:].double() * 2.0**125
    assert set(decoded.tolist()) == {0.0, 1.0}
    assert float(decoded.mean()) == pytest.approx(0.25, abs=6 * math.sqrt(0.25 * 0.75 / 4000))


def test_payload_is_the_largest_power_of_two_then_sign_and_exponent() -> None:
    payload = encode(Natural(), torch.tensor([-8.0, 4.0, 0.0, 8.0 * 2.0**-125, 0.125]))
    assert floats_of(payload[:4]) == [8.0]
    assert payload[4:].tolist() == [128 + 126, 125, 0, 1, 120]


@pytest.mark.parametrize("x", [3.4e38, 2.0**127, 1.5 * 2.0**127, 1e-45, 3e-45, 2.0**-126])
def test_the_ends_of_float32(x: float) -> None:
    decoded = set(draws(Natural(), torch.tensor([x]), 40).view(-1).tolist())
    low = 2.0 ** (math.frexp(float(torch.tensor(x)))[1] - 1)
    assert decoded <= {low, 2 * low if low < 2.0**127 else math.inf}
    assert low in decoded or x == 3.4e38


def test_one_byte_a_value() -> None:
    assert Natural().nbytes(LayerSpec("w", (100, 1000))) == 100004
