"""dct: the largest coefficients of each block's cosine transform."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.codecs import registry
from commlib.codecs.base import LayerSpec, Memory
from commlib.compressors.dct import DCT
from tests.support.hypothesis_strategies import roundtrip
from tests.support.tiers import examples


def test_a_cosine_is_one_coefficient() -> None:
    i = torch.arange(8.0)
    x = torch.cos(math.pi * (i + 0.5) * 3 / 8)
    torch.testing.assert_close(roundtrip(DCT(keep=1, side=8), x), x, atol=1e-6, rtol=0)


def test_a_block_of_one_value_needs_one_coefficient() -> None:
    x = torch.full((64, 64), 2.5)
    torch.testing.assert_close(roundtrip(DCT(keep=1), x), x)


@settings(max_examples=examples(40))
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 12), st.integers(0, 999))
def test_what_is_left_out_is_the_error_and_no_more_than_delta_allows(
    n: int, m: int, side: int, keep: int, seed: int
) -> None:
    x, codec = torch.randn(n, m, generator=torch.Generator().manual_seed(seed)), DCT(keep, side)
    decoded, delta = roundtrip(codec, x), codec.contraction(LayerSpec.of(x))
    error, whole = float((decoded - x).double().square().sum()), float(x.double().square().sum())
    assert error == pytest.approx(whole - float(decoded.double().square().sum()), abs=1e-4 * whole)
    assert delta is not None
    assert error <= (1 - delta + 1e-5) * whole


@pytest.mark.parametrize("shape", [(60, 34), (7, 64), (130,), (1,), (0,), (13, 13)])
def test_all_coefficients_are_the_layer_whatever_its_sides(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    codec = DCT(keep=64 * 64)
    torch.testing.assert_close(roundtrip(codec, x), x, atol=1e-5, rtol=1e-5)


def test_all_coefficients_leave_nothing_of_the_momentum() -> None:
    codec, x = registry.make("dct:keep=4096,ef=0.999"), torch.randn(64, 64)
    memory = Memory.zeros(codec, LayerSpec.of(x))
    payload = torch.empty(codec.nbytes(LayerSpec.of(x)), dtype=torch.uint8)
    codec.compress(x, payload, memory=memory)
    assert memory.new["residual"].abs().max() < 1e-5


def test_32_of_4096_coefficients_are_the_papers_message() -> None:
    assert DCT().nbytes(LayerSpec("w", (1024, 1024))) < 1024 * 1024 * 0.3204 / 8
