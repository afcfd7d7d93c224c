"""Assertions that the contract suite (:mod:`commlib.testing`) makes over and over."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory

_DRAWS = 400  # seeds a statistical check averages over


def require(held: bool, codec: Compressor, spec: LayerSpec | None, broken: str) -> None:
    """Raises AssertionError, naming codec and shape, unless the promise held."""
    if not held:
        raise AssertionError(f"{codec}{f' for shape {spec.shape}' if spec else ''}: {broken}")


def raises(kind: type[Exception], call: Callable[..., object], *args: object, **options: object) -> bool:
    """Whether the call raises such an error; another one goes through."""
    try:
        call(*args, **options)
    except kind:
        return True
    return False


@contextlib.contextmanager
def setting(number: int) -> Iterator[None]:
    """State of torch that nothing may depend on: its global generator, and the default dtype; one for each number."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)  # whoever draws from the global generator is found out
        torch.set_default_dtype((torch.float32, torch.float16, torch.float64)[number % 3])
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def normal(spec: LayerSpec, seed: int) -> Tensor:
    """Standard normal float32 of the layer's shape, drawn from the seed."""
    return torch.randn(spec.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(seed))


def encode(codec: Compressor, x: Tensor, seed: int, memory: Memory | None = None) -> Tensor:
    """The payload of ``x``, uint8 of shape (nbytes,); with fresh slots if none are given."""
    spec = LayerSpec.of(x)
    payload = torch.zeros(codec.nbytes(spec), dtype=torch.uint8)
    codec.compress(x, payload, memory=memory or Memory.zeros(codec, spec), seed=seed)
    return payload


def decode(codec: Compressor, payload: Tensor, spec: LayerSpec, seed: int) -> Tensor:
    """Float32 of the layer's shape."""
    out = torch.zeros(spec.shape, dtype=torch.float32)
    codec.decompress(payload, out, seed=seed)
    return out


def roundtrip(codec: Compressor, x: Tensor, seed: int) -> Tensor:
    """Tensor ``x`` as it comes back, with fresh slots."""
    return decode(codec, encode(codec, x, seed), LayerSpec.of(x), seed)


def seeds(codec: Compressor, seed: int) -> range:
    """Seeds that an average takes: a single one, if the codec draws nothing."""
    return range(seed, seed + (_DRAWS if codec.random else 1))


def standard_error(draws: Tensor) -> float:
    """Standard error of the mean of draws, shape (n,); 0 for one draw."""
    return float(draws.std()) / math.sqrt(len(draws)) if len(draws) > 1 else 0.0


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaNs included."""
    words = torch.int16 if a.dtype.itemsize == 2 else torch.int32
    return torch.equal(a.view(words), b.view(words))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Within a tolerance relative to the largest value of ``b``, or to 1 if that is larger."""
    size = max(1.0, float(b.abs().amax())) if b.numel() else 1.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * size)
