"""sign: one mean, one bit a value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from commlib.codecs.base import LayerSpec
from commlib.compressors.sign import ScaledSign
from tests.support.hypothesis_strategies import GOLDEN, bits_of, encode, floats_of, roundtrip, tensors


def test_golden_vector_and_payload() -> None:
    assert roundtrip(ScaledSign(), GOLDEN).tolist() == [-1.5, -1.5, 1.5, 1.5]
    assert encode(ScaledSign(), GOLDEN).numpy().tobytes().hex() == "0000c03f" + "0c"


@given(tensors())
def test_payload_is_the_mean_and_the_signs(x: torch.Tensor) -> None:
    payload, n = encode(ScaledSign(), x), x.numel()
    assert payload.numel() == (4 + (n + 7) // 8 if n else 0)
    if n:
        assert floats_of(payload[:4]) == pytest.approx([float(x.double().abs().mean())], rel=1e-5, abs=2e-45)
        assert bits_of(payload[4:])[:n] == [int(v >= 0) for v in x.view(-1).tolist()]


def test_contraction_is_reached_by_one_value() -> None:
    x = torch.zeros(50)
    x[3] = -2.0
    error = float((roundtrip(ScaledSign(), x) - x).square().sum())
    assert ScaledSign().contraction(LayerSpec.of(x)) == 1 / 50
    assert error == pytest.approx((1 - 1 / 50) * 4, rel=1e-5)


def test_shrinks_32_times() -> None:
    spec = LayerSpec("w", (256, 256))
    assert spec.nbytes / ScaledSign().nbytes(spec) > 31.9
