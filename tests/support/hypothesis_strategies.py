"""Hypothesis strategies for gradients, and the few lines every codec test needs."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory

GOLDEN = torch.tensor([-2.0, -1.0, 0.0, 3.0])  # ‖x‖² = 14

SHAPES = st.one_of(
    st.sampled_from([(), (0,), (1,), (0, 5), (7, 0), (1, 1), (256,), (257,), (3, 300)]),
    st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple),
)


@st.composite
def tensors(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] = SHAPES, largest: float = 1e30) -> Tensor:
    """Finite float32 of any shape and one of many sizes: all zero, subnormal, huge, or all of it at once."""
    shape = draw(shapes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal(shape)
    match draw(st.sampled_from(["one size", "many sizes", "sparse", "few values", "zero"])):
        case "one size":
            x = x * draw(st.sampled_from([1.0, 1e-45, 1e-40, 1e-38, 1e-20, 1e15, 1e29]))
        case "many sizes":
            x = np.sign(x) * 10.0 ** rng.uniform(-45, 29, shape)
        case "sparse":
            x = x * (rng.random(shape) < 0.05)
        case "few values":  # ties
            x = rng.integers(-2, 3, shape).astype(float)
        case "zero":
            x = np.zeros(shape)
    return torch.from_numpy(np.asarray(np.clip(x, -largest, largest), dtype=np.float32))


def encode(codec: Compressor, x: Tensor, *, seed: int = 0, memory: Memory | None = None) -> Tensor:
    """The payload of ``x``, with fresh memory unless some is given."""
    spec = LayerSpec.of(x)
    payload = torch.zeros(codec.nbytes(spec), dtype=torch.uint8)
    codec.compress(x, payload, memory=memory or Memory.zeros(codec, spec), seed=seed)
    return payload


def decode(codec: Compressor, payload: Tensor, shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    """The values of a payload; what was in the output before does not show."""
    out = torch.full(shape, math.nan)
    codec.decompress(payload, out, seed=seed)
    return out


def roundtrip(codec: Compressor, x: Tensor, *, seed: int = 0, memory: Memory | None = None) -> Tensor:
    return decode(codec, encode(codec, x, seed=seed, memory=memory), tuple(x.shape), seed=seed)


def draws(codec: Compressor, x: Tensor, n: int) -> Tensor:
    """n decodings of ``x`` with as many seeds, float64, shape (n, *x.shape)."""
    return torch.stack([roundtrip(codec, x, seed=s).double() for s in range(n)])


def bits_of(payload: Tensor) -> list[int]:
    """The bits of bytes, lowest first, one by one."""
    return [byte >> i & 1 for byte in payload.tolist() for i in range(8)]


def fields_of(payload: Tensor, n: int, width: int) -> list[int]:
    """n little-endian fields of ``width`` bits, read bit by bit."""
    bits = bits_of(payload)
    return [sum(bits[i * width + j] << j for j in range(width)) for i in range(n)]


def floats_of(payload: Tensor) -> list[float]:
    """Bytes as float32, as Python floats."""
    return [float(v) for v in np.frombuffer(payload.numpy().tobytes(), dtype="<f4")]
