"""randomk: one value a stratum, the same places on all ranks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.codecs.base import LayerSpec
from commlib.compressors.kernels.reference.random import hash32
from commlib.compressors.kernels.reference.topk import strata
from commlib.compressors.randomk import RandomK
from tests.support.hypothesis_strategies import decode, draws, encode, roundtrip

CPU = torch.device("cpu")


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_one_place_in_each_of_k_nearly_equal_strata(n: int, k: int, seed: int) -> None:
    k = min(n, k)
    places, sizes = strata(n, k, seed, CPU)
    starts = [j * n // k for j in range(k + 1)]
    assert sizes.tolist() == [b - a for a, b in itertools.pairwise(starts)]
    assert set(sizes.tolist()) <= {n // k, -(-n // k)}
    assert all(a <= p < b for p, (a, b) in zip(places.tolist(), itertools.pairwise(starts), strict=True))


def test_places_are_uniform_within_a_stratum_and_over_seeds() -> None:
    places, _ = strata(10 * 20000, 20000, 1, CPU)
    one_seed = torch.bincount(places % 10, minlength=10)
    many_seeds = torch.bincount(torch.cat([strata(10, 1, s, CPU)[0] for s in range(5000)]), minlength=10)
    for counts in (one_seed, many_seeds):
        expected = counts.sum() / 10
        assert float(((counts - expected).square() / expected).sum()) < 35  # χ² with 9 degrees: p ≈ 6e-5


def test_neighbouring_places_and_seeds_are_uncorrelated() -> None:
    u = hash32(20000, 5, CPU).double() / 2**32 - 0.5
    v = hash32(20000, 6, CPU).double() / 2**32 - 0.5
    for a, b in ((u[1:], u[:-1]), (u, v), (u[1:], v[:-1]), (u[:-1], v[1:])):
        assert abs(float((a * b).mean()) * 12) < 6 / math.sqrt(len(a))


def test_the_places_of_a_seed_never_change() -> None:
    """They must be the same on every rank, whatever its device and versions."""
    assert hash32(4, 2024, CPU).tolist() == [2303363549, 1142399802, 2271176648, 272073338]


def test_scaled_is_unbiased_with_omega() -> None:
    x = torch.randn(40, generator=torch.Generator().manual_seed(6))
    found = draws(RandomK(0.1, scaled=True), x, 2500)
    assert torch.allclose(found.mean(0), x.double(), atol=6 * 3 * float(x.abs().max()) / math.sqrt(2500))
    energy = float(x.double().square().sum())
    assert float((found - x).square().sum(1).mean()) == pytest.approx(9 * energy, rel=0.1)  # ω = 10 − 1


def test_unscaled_keeps_k_of_n_in_the_mean() -> None:
    x = torch.randn(40, generator=torch.Generator().manual_seed(7))
    codec = RandomK(0.1)
    energy = float(x.double().square().sum())
    assert codec.contraction(LayerSpec.of(x)) == 0.1
    assert float((draws(codec, x, 2500) - x).square().sum(1).mean()) == pytest.approx(0.9 * energy, rel=0.03)


@pytest.mark.parametrize("values", ["fp32", "fp16"])
@pytest.mark.parametrize("scaled", [False, True])
def test_sends_the_values_at_the_places_and_nothing_else(values: str, scaled: bool) -> None:
    x = torch.randn(1003, generator=torch.Generator().manual_seed(8))
    codec = RandomK(0.05, values, scaled)
    payload = encode(codec, x, seed=3)
    places, sizes = strata(1003, 51, 3, CPU)
    dtype = torch.float32 if values == "fp32" else torch.float16
    assert torch.equal(payload.view(dtype), x[places].to(dtype))
    wanted = torch.zeros(1003)
    wanted[places] = x[places].to(dtype).float() * (sizes if scaled else 1)
    assert torch.equal(decode(codec, payload, (1003,), seed=3), wanted)


def test_another_seed_at_the_decoder_puts_the_values_elsewhere() -> None:
    x = torch.arange(1.0, 101.0)
    codec = RandomK(0.1)
    assert not torch.equal(decode(codec, encode(codec, x, seed=1), (100,), seed=2), roundtrip(codec, x, seed=1))


def test_a_value_that_is_not_sent_still_poisons() -> None:
    for place in range(20):
        x = torch.ones(20)
        x[place] = math.nan
        assert roundtrip(RandomK(0.05), x, seed=1).isnan().any()


@pytest.mark.parametrize(("scaled", "unbiased"), [(False, False), (True, True)])
def test_scaling_decides_whether_it_is_unbiased(scaled: bool, unbiased: bool) -> None:
    codec = RandomK(scaled=scaled)
    assert codec.unbiased is unbiased
    assert codec.shared_seed
    assert codec.default_exchange == "dense"
    assert codec.reduce_dtype(LayerSpec("w", (5,))) == torch.float32
    assert codec.nbytes(LayerSpec("w", (10000,))) == 400
