"""The kernels for GPUs are the reference, to the last bit: on a GPU, and without one in Triton's interpreter.

Triton asks ``TRITON_INTERPRET`` when it is imported, and PyTorch's compiler imports it, too: so what is interpreted
has a process of its own, in which this file is tested once more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commlib.compressors.kernels.dispatch import Kernels
from commlib.compressors.kernels.gpu import block_statistics, codecs
from commlib.compressors.kernels.reference.fixed_order_sums import fold
from tests.support.kernel_cases import LOOPS, PLAIN, Loop, check_decoding, check_encoding, same, vectors

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
@given(x=vectors(), carried=st.booleans())
def test_encodes_what_the_reference_does_and_keeps_what_it_keeps(
    loop: Loop, device: str, x: Tensor, carried: bool
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
def test_the_residual_may_be_in_place(loop: Loop, device: str, n: int) -> None:
    x = torch.randn(n + 1, generator=torch.Generator().manual_seed(2))[1:]
    check_encoding(COMPILED, loop, x, carried=True, device=device, in_place=True)
    check_decoding(COMPILED, loop, x, 2, True, 0.5, device)


@devices
@loops
@pytest.mark.parametrize("value", [-0.0, torch.nan, -torch.inf])
def test_zeros_have_the_references_sign_and_what_is_not_finite_stays_so(loop: Loop, device: str, value: float) -> None:
    x = torch.full((3072,), -0.0)
    x[70] = value
    check_encoding(COMPILED, loop, x, carried=value != 0, device=device)


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["two means, column 2048", "two means, one column", "sign", "int8", "qsgd", "natural"])
def test_millions_of_values_on_a_gpu(name: str) -> None:
    x = torch.randn(3_000_001, generator=torch.Generator().manual_seed(3))
    check_encoding(COMPILED, LOOPS[name], x, carried=True, device="cuda")
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
