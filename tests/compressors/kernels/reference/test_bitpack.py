"""Packing: against codes read bit by bit, and for every width."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.compressors.kernels.reference import bitpack
from tests.support.hypothesis_strategies import bits_of, fields_of
from tests.support.tiers import examples


@pytest.mark.parametrize("width", [*range(1, 18), 24, 31, 33, 48])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 41])
def test_fields_are_one_gapless_little_endian_stream(width: int, n: int) -> None:
    rng = random.Random(width * 100 + n)
    values = [rng.choice([0, (1 << width) - 1, rng.randrange(1 << width)]) for _ in range(n)]
    packed = bitpack.pack_fields(torch.tensor(values, dtype=torch.int64), width)
    assert packed.numel() == math.ceil(n * width / 8) == bitpack.fields_nbytes(n, width)
    assert fields_of(packed, n, width) == values
    assert not any(bits_of(packed)[n * width :])
    assert bitpack.unpack_fields(packed, n, width).tolist() == values


def test_fields_of_no_bits_take_no_bytes() -> None:
    packed = bitpack.pack_fields(torch.zeros(5, dtype=torch.int64), 0)
    assert packed.numel() == 0
    assert bitpack.unpack_fields(packed, 5, 0).tolist() == [0] * 5


@given(st.lists(st.booleans(), max_size=70))
def test_bits_are_fields_of_one_bit(values: list[bool]) -> None:
    packed = bitpack.pack_bits(torch.tensor(values, dtype=torch.bool))
    assert torch.equal(packed, bitpack.pack_fields(torch.tensor(values, dtype=torch.int64), 1))
    assert bitpack.unpack_bits(packed, len(values)).tolist() == values


@given(st.lists(st.integers(0, 2), max_size=40))
def test_five_trits_are_a_base_3_number(trits: list[int]) -> None:
    packed = bitpack.pack_trits(torch.tensor(trits, dtype=torch.int32))
    groups = [trits[i : i + 5] for i in range(0, len(trits), 5)]
    assert packed.tolist() == [sum(t * 3**i for i, t in enumerate(g)) for g in groups]
    assert bitpack.unpack_trits(packed, len(trits)).tolist() == trits


def naive_elias_fano(indices: list[int], n: int) -> tuple[int, list[int], list[int]]:
    """(l, low parts, unary bits): each index's upper part as that many zeros since the last, then a one."""
    low = math.floor(math.log2(n / len(indices)))
    unary: list[int] = []
    last = 0
    for i in indices:
        upper = i >> low
        unary += [0] * (upper - last) + [1]
        last = upper
    return low, [i & ((1 << low) - 1) for i in indices], unary


@st.composite
def index_sets(draw: st.DrawFn) -> tuple[int, list[int]]:
    n = draw(st.integers(1, 3000))
    k = draw(st.one_of(st.just(n), st.integers(1, n), st.integers(1, min(n, 5))))
    return n, sorted(random.Random(draw(st.integers(0, 999))).sample(range(n), k))


@settings(max_examples=examples(150))
@given(index_sets())
def test_elias_fano_equals_the_naive_code(case: tuple[int, list[int]]) -> None:
    n, indices = case
    k = len(indices)
    payload = torch.full((bitpack.elias_fano_nbytes(n, k),), 255, dtype=torch.uint8)
    bitpack.elias_fano_encode(torch.tensor(indices), n, payload)
    low, parts, unary = naive_elias_fano(indices, n)
    head = math.ceil(k * low / 8)
    assert fields_of(payload[:head], k, low) == parts
    vector = bits_of(payload[head:])
    assert vector[: len(unary)] == unary
    assert not any(vector[len(unary) :])
    assert bitpack.elias_fano_decode(payload, n, k).tolist() == indices


@pytest.mark.parametrize("extreme", ["first", "last"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 64), (1000, 1), (1024, 16), (1023, 16), (5000, 4999)])
def test_elias_fano_holds_the_extreme_sets(n: int, k: int, extreme: str) -> None:
    indices = torch.arange(k) + (0 if extreme == "first" else n - k)
    payload = torch.zeros(bitpack.elias_fano_nbytes(n, k), dtype=torch.uint8)
    bitpack.elias_fano_encode(indices, n, payload)
    assert torch.equal(bitpack.elias_fano_decode(payload, n, k), indices)


@pytest.mark.parametrize("n", [10**4, 10**6, 10**9, 2**40])
@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 0.001])
def test_elias_fano_takes_about_two_bits_more_than_the_logarithm(n: int, share: float) -> None:
    k = math.ceil(n * share)
    per_index = 8 * bitpack.elias_fano_nbytes(n, k) / k
    assert math.log2(n / k) <= per_index <= 2 + math.log2(n / k) + 32 / k


@given(st.binary(min_size=bitpack.elias_fano_nbytes(100, 9), max_size=bitpack.elias_fano_nbytes(100, 9)))
def test_elias_fano_decodes_garbage_to_places_that_exist(garbage: bytes) -> None:
    places = bitpack.elias_fano_decode(torch.tensor(list(garbage), dtype=torch.uint8), 100, 9)
    assert places.shape == (9,)
    assert 0 <= int(places.min()) <= int(places.max()) < 100
