"""fp16 and bf16."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from commlib.codecs.base import LayerSpec
from commlib.compressors.bf16 import BFloat16
from commlib.compressors.fp16 import Float16
from commlib.compressors.none import Identity
from tests.support.hypothesis_strategies import encode, roundtrip, tensors


@given(tensors(largest=6e4))
def test_fp16_payload_is_numpys_half(x: torch.Tensor) -> None:
    assert encode(Float16(), x).numpy().tobytes() == x.numpy().astype("<f2").tobytes()


@given(tensors())
def test_bf16_payload_is_the_upper_half_of_float32_rounded_to_even(x: torch.Tensor) -> None:
    word = x.numpy().view("<u4").astype(np.uint64)
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    assert encode(BFloat16(), x).numpy().tobytes() == rounded.astype("<u2").tobytes()


def test_fp16_shows_an_overflow_and_bf16_holds_it() -> None:
    x = torch.tensor([65504.0, 65536.0, -1e30])
    assert roundtrip(Float16(), x).tolist() == [65504.0, math.inf, -math.inf]
    assert torch.allclose(roundtrip(BFloat16(), x), x, rtol=2**-8)


@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=str)
def test_scaling_happens_in_float32(codec: Float16 | BFloat16) -> None:
    x = torch.tensor([60000.0, 1 / 3])
    payload = encode(codec, x)
    out = torch.zeros(2)
    codec.decompress(payload, out, scale=1000.1)
    assert torch.equal(out, payload.view(codec.wire).float() * 1000.1)


@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=str)
def test_two_bytes_a_value_and_summable(codec: Float16 | BFloat16) -> None:
    spec = LayerSpec("w", (3, 5))
    assert codec.nbytes(spec) == 30
    assert codec.reduce_dtype(spec) == codec.wire
    assert codec.default_exchange == "dense"
    assert not codec.unbiased


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_none_keeps_every_dtype_bit_for_bit(dtype: torch.dtype) -> None:
    x = torch.randn(33, dtype=torch.float64).to(dtype)
    payload = torch.zeros(x.nbytes, dtype=torch.uint8)
    Identity().compress(x, payload)
    assert payload.numpy().tobytes() == x.view(torch.uint8).numpy().tobytes()
    out = torch.empty_like(x)
    Identity().decompress(payload, out)
    assert torch.equal(out, x)
