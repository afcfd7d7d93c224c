"""int8 and int4: nearest levels of a block's absmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.codecs.base import LayerSpec
from commlib.compressors.base.blockwise import BlockQuantized
from commlib.compressors.int4 import Int4
from commlib.compressors.int8 import Int8
from tests.support.hypothesis_strategies import GOLDEN, encode, fields_of, floats_of, roundtrip, tensors
from tests.support.tiers import examples

CODECS = st.one_of(
    st.builds(Int8, block=st.sampled_from([1, 3, 64, 256])), st.builds(Int4, block=st.sampled_from([1, 5, 128]))
)


def naive_levels(x: np.ndarray, block: int, levels: int) -> tuple[list[float], list[float]]:
    """(scales, levels before they are rounded) by the definition, in doubles."""
    scales, exact = [], []
    for start in range(0, x.size, block):
        part = x[start : start + block].astype(np.float64)
        top = np.abs(part).max()
        scales.append(float(top))
        exact += (part / top * levels if top else part).tolist()
    return scales, exact


@settings(max_examples=examples(40))
@given(CODECS, tensors())
def test_payload_is_float32_absmaxima_then_packed_levels(codec: BlockQuantized, x: torch.Tensor) -> None:
    scales, exact = naive_levels(x.view(-1).numpy(), codec.block, codec.levels)
    payload = encode(codec, x)
    head, width = 4 * len(scales), 8 if codec.levels == 127 else 4
    assert payload.numel() == head + (len(exact) * width + 7) // 8
    assert floats_of(payload[:head]) == scales
    rounding = 2.0**-22 * codec.levels  # of two float32 operations: next to a half, either level is the nearest
    for code, level in zip(fields_of(payload[head:], len(exact), width), exact, strict=True):
        between = abs(level - math.floor(level) - 0.5) <= rounding
        assert code - codec.levels in ((math.floor(level), math.ceil(level)) if between else (round(level),))


@settings(max_examples=examples(40))
@given(CODECS, tensors())
def test_error_is_at_most_half_a_level_and_absmax_is_exact(codec: BlockQuantized, x: torch.Tensor) -> None:
    decoded = roundtrip(codec, x).view(-1)
    for part, back in zip(x.view(-1).split(codec.block), decoded.split(codec.block), strict=True):
        if part.numel():
            top = part.abs().max()
            limit = top.double() / (2 * codec.levels) * (1 + 1e-5) + 1e-44
            assert (part.double() - back).abs().max() <= limit
            peak = part.abs() == top
            assert torch.equal(back[peak], part[peak])


def test_golden_vector() -> None:
    assert encode(Int8(), GOLDEN).numpy().tobytes().hex() == "00004040" + bytes([42, 85, 127, 254]).hex()
    assert encode(Int4(), GOLDEN).numpy().tobytes().hex() == "00004040" + "52e7"  # 2, 5 | 7, 14
    assert torch.allclose(roundtrip(Int8(), GOLDEN), torch.tensor([-85 / 127, -42 / 127, 0, 1]) * 3)


@pytest.mark.parametrize("codec", [Int8(), Int4(), Int8(block=31)], ids=str)
def test_contraction_is_nearly_reached_by_half_levels(codec: BlockQuantized) -> None:
    x = torch.full((codec.block,), 0.4999 / codec.levels)
    x[0] = 1.0
    error = float((roundtrip(codec, x) - x).square().sum() / x.square().sum())
    delta = codec.contraction(LayerSpec.of(x))
    assert delta is not None
    assert error == pytest.approx(1 - delta, rel=1e-2)
    assert error <= 1 - delta


def test_sizes() -> None:
    spec = LayerSpec("w", (64, 1024))
    assert Int8().nbytes(spec) == 65536 + 4 * 256
    assert Int4().nbytes(spec) == 32768 + 4 * 512
