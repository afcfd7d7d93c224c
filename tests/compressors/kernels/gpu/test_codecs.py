"""The kernels for GPUs are the reference, to the last bit: on a GPU, and without one in Triton's interpreter.

Triton asks ``TRITON_INTERPRET`` when it is imported, and PyTorch's compiler imports it, too: so what is interpreted
has a process of its own, in which this file is tested once more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import cast
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs import residuals
from commlib.codecs.slots import Carry
from commlib.compressors.kernels.dispatch import Kernels
from commlib.compressors.kernels.gpu import block_statistics, codecs
from commlib.compressors.kernels.gpu.microscaling import TritonLoops
from commlib.compressors.kernels.reference.bitpack import elias_fano_nbytes
from commlib.compressors.kernels.reference.fixed_order_sums import fold
from tests.support.kernel_cases import CARRIED, LOOPS, PLAIN, UP, Loop, check_decoding, check_encoding, same, vectors

COMPILED = cast(Kernels, codecs)
INTERPRETED = codecs.interpreted()

# The interpreter computes in numpy, which warns of infinities that the reference has, too.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

loops = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
devices = pytest.mark.parametrize("device", ["cpu" if INTERPRETED else pytest.param("cuda", marks=pytest.mark.gpu)])
few = settings(max_examples=10 if INTERPRETED else 20, deadline=None)


@devices
@loops
@few
@given(x=vectors(), carried=st.sampled_from(CARRIED))
def test_encodes_what_the_reference_does_and_keeps_what_it_keeps(
    loop: Loop, device: str, x: Tensor, carried: torch.dtype | None
) -> None:
    check_encoding(COMPILED, loop, x, carried, device)


@devices
@loops
@few
@given(x=vectors(), ranks=st.integers(1, 3), add=st.booleans(), scale=st.sampled_from([1.0, -1.0, 1 / 3]))
def test_decodes_what_the_reference_does_for_any_number_of_ranks(
    loop: Loop, device: str, x: Tensor, ranks: int, add: bool, scale: float
) -> None:
    check_decoding(COMPILED, loop, x, ranks, add, scale, device)


@devices
@loops
@pytest.mark.parametrize("n", [0, 1, 9001])
@pytest.mark.parametrize("kind", CARRIED[1:], ids=str)
def test_the_residual_may_be_in_place(loop: Loop, device: str, n: int, kind: torch.dtype) -> None:
    x = torch.randn(n + 1, generator=torch.Generator().manual_seed(2))[1:]
    check_encoding(COMPILED, loop, x, carried=kind, device=device, in_place=True)
    check_decoding(COMPILED, loop, x, 2, True, 0.5, device)


@devices
@loops
@pytest.mark.parametrize("value", [-0.0, torch.nan, -torch.inf])
def test_zeros_have_the_references_sign_and_what_is_not_finite_stays_so(loop: Loop, device: str, value: float) -> None:
    x = torch.full((3072,), -0.0)
    x[70] = value
    check_encoding(COMPILED, loop, x, carried=torch.float32 if value else None, device=device)


@devices
@few
@given(x=vectors(), width=st.sampled_from([32, 96, 1024]), up=st.integers(0, 0xFFFF))
def test_holds_as_int8_what_the_reference_does_and_adds_it(device: str, x: Tensor, width: int, up: int) -> None:
    x = x[: len(x) // width * width].view(-1, width)
    room, before = residuals.room(x.shape, torch.int8), torch.linspace(-1, 1, x.numel()).view(x.shape)
    held, wanted = (torch.full(room, 7, dtype=torch.int8, device=at) for at in (device, "cpu"))
    out, expected = before.to(device, copy=True), before.clone()
    kernels = TritonLoops()
    kernels.shorten(x.to(device).contiguous(), held, up)
    kernels.add(held, out)
    with mock.patch.object(residuals, "compiled", {}):
        residuals.shorten(x.clone(), wanted, up)
        residuals.add(wanted, expected, 1.0)
    assert torch.equal(held.cpu(), wanted)
    assert same(out.cpu(), expected)


@devices
@pytest.mark.parametrize("parts", [1, 2, 1024, 1025, 5000])
def test_sums_of_sums_are_folded(device: str, parts: int) -> None:
    sums = torch.randn(3, parts, generator=torch.Generator().manual_seed(parts))
    assert same(block_statistics.folded(sums.to(device)).cpu(), fold(sums))


@devices
def test_an_orthonormal_basis_is_one_of_the_same_columns(device: str) -> None:
    p, spare = (torch.randn(300, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
    p[:, 1], p[7, 2] = 0, torch.inf
    basis, wanted = p.to(device), p.clone()
    COMPILED.orthonormal(basis, spare.to(device))
    PLAIN.orthonormal(wanted, spare)
    assert torch.allclose(basis.cpu() @ basis.cpu().T, wanted @ wanted.T, atol=1e-5)


@devices
@few
@given(x=vectors(), share=st.sampled_from([0, 0.0005, 0.01, 0.3, 0.9, 1]), carried=st.sampled_from(CARRIED))
def test_takes_the_largest_that_the_reference_takes(
    device: str, x: Tensor, share: float, carried: torch.dtype | None
) -> None:
    k = min(len(x), -(-int(share * 10000) * len(x) // 10000))
    old = torch.linspace(-1e-3, 1e-3, len(x)).to(carried or torch.float32)
    kept, left = torch.full_like(old, 7).to(device), torch.full_like(old, 7)
    places, values = COMPILED.largest(x.to(device), k, Carry(old.to(device), kept, UP) if carried else None)
    wanted, theirs = PLAIN.largest(x, k, Carry(old, left, UP) if carried else None)
    assert torch.equal(places.cpu(), wanted)
    assert same(values.cpu(), theirs)
    assert same(kept.cpu(), left)


@devices
@settings(few, max_examples=40)
@given(data=st.data(), n=st.one_of(st.integers(1, 300), st.integers(1, 10**12)))
def test_codes_places_as_the_reference_does(device: str, data: st.DataObject, n: int) -> None:
    some = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=100)))
    check_places(device, torch.tensor(some), n)


@devices
@pytest.mark.parametrize("each", [1, 2, 7, 300, 40_000])
def test_codes_more_places_than_a_program_has(device: str, each: int) -> None:
    steps = torch.randint(1, 2 * each, (9001,), generator=torch.Generator().manual_seed(each))
    check_places(device, steps.cumsum(0), int(steps.sum()) + 1)


def check_places(device: str, places: Tensor, n: int) -> None:
    coded, wanted = (torch.full((elias_fano_nbytes(n, len(places)) + 1,), 255, dtype=torch.uint8) for _ in range(2))
    on = coded.to(device)
    COMPILED.places_encode(places.to(device), n, on[1:])  # at any boundary
    PLAIN.places_encode(places, n, wanted[1:])
    assert torch.equal(on.cpu(), wanted)
    assert torch.equal(COMPILED.places_decode(on[1:], n, len(places)).cpu(), places)
    if n <= 1 << 20:
        values = torch.linspace(-1, 1, len(places))
        COMPILED.places_add(on[1:], values.to(device), 0.5, out := torch.ones(n, device=device))
        PLAIN.places_add(wanted[1:], values, 0.5, theirs := torch.ones(n))
        assert torch.equal(out.cpu(), theirs)


@devices
@few
@given(data=st.binary(min_size=40, max_size=40), k=st.integers(1, 60))
def test_places_are_within_the_layer_whatever_the_bytes_are(device: str, data: bytes, k: int) -> None:
    payload = torch.tensor(list(data), dtype=torch.uint8)[: elias_fano_nbytes(100, k)]
    places = COMPILED.places_decode(payload.to(device), 100, k)
    assert len(places) == k
    assert 0 <= places.min() <= places.max() < 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["two means, column 2048", "two means, one column", "sign", "int8", "qsgd", "natural"])
def test_millions_of_values_on_a_gpu(name: str) -> None:
    x = torch.randn(3_000_001, generator=torch.Generator().manual_seed(3))
    check_encoding(COMPILED, LOOPS[name], x, carried=torch.float32, device="cuda")
    check_decoding(COMPILED, LOOPS[name], x, 3, False, 1 / 3, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_graph_of_them_replays(loop: Loop) -> None:
    """Nothing asks the device for a number, and nothing that is captured stays behind on the host."""
    x, out = torch.randn(9001, device="cuda"), torch.zeros(9001, device="cuda")
    payload = torch.zeros(loop.nbytes(9001), dtype=torch.uint8, device="cuda")

    def both() -> None:
        loop.encode(COMPILED, x, payload, None)
        loop.decode(COMPILED, payload[None], out, False, 1.0)

    both()  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    x.normal_()
    graph.replay()
    replayed = out.clone()
    both()
    assert torch.equal(out, replayed)


if not INTERPRETED:

    @pytest.mark.full
    @pytest.mark.parametrize("which", ["encodes or zeros", "not (encodes or zeros)"])  # of 40 s, half each
    def test_all_of_it_in_tritons_interpreter(which: str) -> None:
        # without conftest.py, for this test has its turn already, and passes it on to nobody
        command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", __file__]
        chosen = ["-m", "not gpu", "-k", which]
        env = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run([*command, *chosen], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
