"""The compiled loops are the reference, to the last bit."""

from __future__ import annotations

import threading
from typing import cast
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.slots import Carry
from commlib.compressors.kernels.cpu import codecs, onebit
from commlib.compressors.kernels.dispatch import Kernels
from commlib.compressors.kernels.reference.bitpack import elias_fano_nbytes
from tests.support.kernel_cases import (
    CARRIED,
    LOOPS,
    PLAIN,
    UP,
    Loop,
    check_decoding,
    check_encoding,
    encoded,
    same,
    two_means,
    vectors,
)
from tests.support.tiers import examples

COMPILED = cast(Kernels, codecs)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@settings(max_examples=examples(60), deadline=None)  # the first example compiles
@given(x=vectors(), carried=st.sampled_from(CARRIED))
def test_encodes_what_the_reference_does_and_keeps_what_it_keeps(
    loop: Loop, x: Tensor, carried: torch.dtype | None
) -> None:
    check_encoding(COMPILED, loop, x, carried)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@settings(max_examples=examples(60), deadline=None)
@given(x=vectors(), ranks=st.integers(1, 3), add=st.booleans(), scale=st.sampled_from([1.0, -1.0, 1 / 3]))
def test_decodes_what_the_reference_does_for_any_number_of_ranks(
    loop: Loop, x: Tensor, ranks: int, add: bool, scale: float
) -> None:
    check_decoding(COMPILED, loop, x, ranks, add, scale)


@settings(max_examples=examples(200), deadline=None)
@given(x=vectors(), share=st.sampled_from([0, 0.0005, 0.01, 0.1, 0.3, 0.9, 1]), carried=st.sampled_from(CARRIED))
def test_takes_the_largest_that_the_reference_takes(x: Tensor, share: float, carried: torch.dtype | None) -> None:
    k = min(len(x), -(-int(share * 10000) * len(x) // 10000))
    old = torch.linspace(-1e-3, 1e-3, len(x)).to(carried or torch.float32)
    kept, left = torch.full_like(old, 7), torch.full_like(old, 7)
    places, values = COMPILED.largest(x, k, Carry(old, kept, UP) if carried else None)
    wanted, theirs = PLAIN.largest(x, k, Carry(old, left, UP) if carried else None)
    assert torch.equal(places, wanted)
    assert same(values, theirs)
    assert same(kept, left)


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data(), n=st.one_of(st.integers(1, 300), st.integers(1, 10**12)))
def test_codes_places_as_the_reference_does(data: st.DataObject, n: int) -> None:
    some = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=100)))
    places = torch.tensor(some)
    payloads = [torch.full((elias_fano_nbytes(n, len(some)),), 255, dtype=torch.uint8) for _ in range(2)]
    for kernels, payload in zip((COMPILED, PLAIN), payloads, strict=True):
        kernels.places_encode(places, n, payload)
    assert torch.equal(*payloads)
    assert torch.equal(COMPILED.places_decode(payloads[0], n, len(some)), places)


@given(data=st.data(), n=st.integers(1, 300), scale=st.sampled_from([1.0, 0.5, 1 / 3, -1.0]))
def test_adds_values_at_coded_places_as_the_reference_does(data: st.DataObject, n: int, scale: float) -> None:
    some = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=100)))
    payload = torch.zeros(elias_fano_nbytes(n, len(some)), dtype=torch.uint8)
    PLAIN.places_encode(torch.tensor(some), n, payload)
    values = torch.tensor(data.draw(st.lists(st.floats(width=32), min_size=len(some), max_size=len(some))))
    sums = [torch.linspace(-1, 1, n) for _ in range(2)]
    for kernels, out in zip((COMPILED, PLAIN), sums, strict=True):
        kernels.places_add(payload, values, scale, out)
    assert same(*sums)


@given(data=st.binary(min_size=40, max_size=40), k=st.integers(1, 60))
def test_places_are_within_the_layer_whatever_the_bytes_are(data: bytes, k: int) -> None:
    payload = torch.tensor(list(data), dtype=torch.uint8)[: elias_fano_nbytes(100, k)]
    places = COMPILED.places_decode(payload, 100, k)
    assert len(places) == k
    assert 0 <= places.min() <= places.max() < 100
    COMPILED.places_add(payload, torch.ones(k), 1.0, out := torch.zeros(100))
    assert out.sum() == k  # all of them in the layer


@settings(max_examples=examples(150), deadline=None)
@given(x=vectors(), r=st.integers(1, 5), repeated=st.booleans())
def test_makes_the_orthonormal_basis_that_the_reference_makes(x: Tensor, r: int, repeated: bool) -> None:
    p = x[: len(x) // r * r].view(-1, r).clone()
    r = min(p.shape)
    p = p[:, :r].contiguous()
    if repeated and r:
        p[:, -1] = p[:, 0]
    spare = torch.linspace(-1, 1, p.numel()).view(p.shape)
    basis, wanted = p.clone(), p.clone()
    COMPILED.orthonormal(basis, spare)
    PLAIN.orthonormal(wanted, spare)
    assert same(basis, wanted)
    if r:
        assert torch.allclose(basis.T.double() @ basis.double(), torch.eye(r).double(), atol=1e-6)


@given(n=st.integers(1, 2**31), k=st.integers(1, 300), seed=st.integers(0, 2**64 - 1))
def test_draws_the_places_that_the_reference_draws(n: int, k: int, seed: int) -> None:
    k, cpu = min(n, k), torch.device("cpu")
    drawn = zip(COMPILED.strata(n, k, seed, cpu), PLAIN.strata(n, k, seed, cpu), strict=True)
    assert all(torch.equal(a, b) for a, b in drawn)


def test_takes_the_largest_of_what_a_sample_says_little_about() -> None:
    """All but a few values are equal, or all large ones lie where no sample is taken: the guess is wrong."""
    n = 1 << 20
    level = torch.ones(n)
    level[1::4096] = 2
    hidden = torch.rand(n, generator=torch.Generator().manual_seed(0)) * 1e-3
    hidden[5::32] = 1 + torch.rand(n // 32, generator=torch.Generator().manual_seed(1))
    for x in (level, hidden, -level, torch.zeros(n)):
        for k in (1, 200, 5000, 100000):
            assert torch.equal(COMPILED.largest(x, k)[0], PLAIN.largest(x, k)[0])


@settings(max_examples=examples(100), deadline=None)
@given(
    g=vectors(),
    m=st.floats(0, 0.999),
    nesterov=st.booleans(),
    in_place=st.booleans(),
    share=st.sampled_from([0, 0.01, 0.3, 1]),
)
def test_momentum_and_the_largest_of_it_are_the_references(
    g: Tensor, m: float, nesterov: bool, in_place: bool, share: float
) -> None:
    k, results = int(share * len(g)), []
    for kernels in (COMPILED, PLAIN):
        old, residual = torch.linspace(-1, 1, len(g)), torch.linspace(3, -1, len(g))
        u, v = (old, residual) if in_place else (torch.empty_like(g), torch.empty_like(g))
        places, values = kernels.largest_moved(g, k, m, old, u, Carry(residual, v), nesterov=nesterov)
        results.append((u, v, places, values))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("kind", CARRIED[1:], ids=str)
def test_the_residual_may_be_in_place(loop: Loop, kind: torch.dtype) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    check_encoding(COMPILED, loop, x, carried=kind, in_place=True)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_short_residual_of_more_values_than_a_tile_is_that_of_the_reference(loop: Loop, in_place: bool) -> None:
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(3))
    check_encoding(COMPILED, loop, x, torch.bfloat16, in_place=in_place)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("k", [1, 1000, 90_000])
def test_the_largest_beside_a_short_residual_are_those_of_the_reference(k: int, in_place: bool) -> None:
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(3))
    x[5000:9000] = 3.0  # a sample does not tell how many are as large
    results = []
    for kernels in (COMPILED, PLAIN):
        old = torch.linspace(-1, 1, len(x)).to(torch.bfloat16)
        kept = old if in_place else torch.empty_like(old)
        results.append((*kernels.largest(x, k, Carry(old, kept, UP)), kept))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def rows_of(x: Tensor, width: int) -> Tensor:
    """As many rows of so many values as there are."""
    return x[: len(x) // width * width].view(-1, width)


@settings(max_examples=examples(200), deadline=None)
@given(x=vectors(), width=st.sampled_from([32, 96, 1024]), up=st.integers(0, 0xFFFF))
def test_holds_as_int8_what_the_reference_does_and_adds_it(x: Tensor, width: int, up: int) -> None:
    x = rows_of(x, width)
    held, out = [], []
    for loops in (residuals.compiled, {}):
        with mock.patch.object(residuals, "compiled", loops):
            held.append(torch.full(residuals.room(x.shape, torch.int8), 7, dtype=torch.int8))
            residuals.shorten(x.clone(), held[-1], up)
            out.append(torch.linspace(-1, 1, x.numel()).view(x.shape))
            residuals.add(held[-1], out[-1], 1.0)
    assert torch.equal(*held)
    assert same(*out)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_beside_a_residual_as_int8_it_encodes_and_keeps_what_the_reference_does_in_float32(
    loop: Loop, in_place: bool
) -> None:
    x = torch.randn(1043 * 96, generator=torch.Generator().manual_seed(3))  # more than a tile
    held = torch.empty(residuals.room((1043, 96), torch.int8), dtype=torch.int8)
    residuals.convert(torch.linspace(-1, 1, len(x)), held)
    wanted, left = encoded(PLAIN, loop, x, residuals.widen(held))
    new, payload = held if in_place else torch.full_like(held, 7), torch.zeros_like(wanted)
    loop.encode(COMPILED, x, payload, Carry(held, new, UP))
    shortened = torch.empty_like(held)
    residuals.shorten(left, shortened, UP)
    assert torch.equal(payload, wanted)
    assert torch.equal(new, shortened)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_sum_of_negative_zeros_has_the_references_sign(loop: Loop) -> None:
    check_encoding(COMPILED, loop, torch.full((3072,), -0.0), carried=None)


LARGE = {**LOOPS, "two_means of 2048": two_means(2048), "two_means of 1040": two_means(1040)}


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("loop", LARGE.values(), ids=LARGE)
def test_a_layer_that_is_written_past_the_caches_is_the_same(loop: Loop, start: int) -> None:
    n = onebit.PAST + 5000
    x = torch.randn(n + start, generator=torch.Generator().manual_seed(3))[start:]
    (payload, kept), (wanted, left) = (encoded(k, loop, x, x.flip(0)) for k in (COMPILED, PLAIN))
    assert same(payload.view(loop.wire), wanted.view(loop.wire))
    assert same(kept, left)
    out, expected = (torch.zeros(n + start)[start:] for _ in range(2))
    loop.decode(COMPILED, payload[None], out, False, 0.5)
    loop.decode(PLAIN, payload[None], expected, False, 0.5)
    assert same(out, expected)


def test_no_loop_holds_the_interpreter() -> None:
    """While one runs for long in a thread, this one goes on."""
    x, payload = torch.randn(1 << 24), torch.zeros(LOOPS["natural"].nbytes(1 << 24), dtype=torch.uint8)
    LOOPS["natural"].encode(COMPILED, x[:8], payload[:12], None)  # compiled
    begun, ended, counted = threading.Event(), threading.Event(), 0

    def run() -> None:
        begun.set()
        for _ in range(4):
            LOOPS["natural"].encode(COMPILED, x, payload, None)
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    while not ended.is_set():
        counted += 1
    thread.join()
    assert counted > 1000
