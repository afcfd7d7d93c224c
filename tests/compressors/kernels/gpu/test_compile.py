"""Triton compiles every kernel for GPUs, without one: what its interpreter lets pass its compiler may not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from commlib.codecs.slots import Carry
from commlib.compressors.kernels.dispatch import Kernels
from commlib.compressors.kernels.gpu import block_statistics, codecs, places
from commlib.compressors.kernels.gpu.jit import AS_WRITTEN
from commlib.compressors.kernels.reference.bitpack import elias_fano_nbytes
from tests.support.kernel_cases import LOOPS
from tests.support.tiers import full

pytestmark = pytest.mark.skipif(codecs.interpreted(), reason="nothing is compiled")

TYPES = {torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}
FOUR = [["tt.divisibility", 16]]


def assembly(target: GPUTarget, kernel: Any, warps: int, arguments: dict[str, Any], constants: dict[str, Any]) -> str:
    """What a launch with these arguments would run; like Triton's own launch it makes constants of ones."""
    types, ones, aligned = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = constants.get(name, arguments.get(name))
        if name in constants or (type(value) is int and value == 1):
            types[name], ones[(place,)] = "constexpr", value
        elif isinstance(value, Tensor):
            types[name], aligned[(place,)] = TYPES[value.dtype], FOUR
        else:
            types[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                aligned[(place,)] = FOUR
    options = {"num_warps": warps, **AS_WRITTEN}
    return str(triton.compile(ASTSource(kernel, types, ones, aligned), target=target, options=options).asm["ptx"])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Takes the assembly of every kernel instead of its run."""
    texts: list[str] = []

    def launch(
        kernel: Any,
        programs: int,
        like: Tensor,
        *args: Any,
        warps: int = 4,
        registers: int | None = None,
        **constants: Any,
    ) -> None:
        assert programs > 0
        named = dict(zip(kernel.arg_names, args, strict=False))
        texts.append(assembly(GPUTarget("cuda", 80, 32), kernel, warps, named, constants))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for module in (codecs, block_statistics, places):
        monkeypatch.setattr(module, "launch", launch)
    return texts


@pytest.mark.parametrize("n", [8192, *full(1)])
@pytest.mark.parametrize(
    "name",
    ["fp16", "two means, column 2048", "int4", "natural", "qsgd",
     *full("bf16", "two means, column 8200", "sign", "11 bits", "qsgd, block 2000", "ternary, block 100")],
)  # fmt: skip
def test_it_compiles_and_fuses_approximates_and_flushes_nothing(compiled: list[str], name: str, n: int) -> None:
    loop, kernels = LOOPS[name], cast(Kernels, codecs)
    x, payload = torch.zeros(n), torch.zeros(loop.nbytes(n), dtype=torch.uint8)
    loop.encode(kernels, x, payload, Carry(x, x))
    loop.decode(kernels, payload.expand(3, -1), x, False, 0.5)
    assert compiled
    for text in compiled:
        assert not re.findall(r"fma\.\S+|(?:add|sub|mul|div|sqrt)\.\S*ftz\S*|(?:div|sqrt)\.(?:full|approx)\S*", text)


@pytest.mark.parametrize("k", [70, *full(1, 3000)])  # few bits of a place go into fields, or none
def test_what_finds_and_codes_the_largest_compiles(compiled: list[str], k: int) -> None:
    x, n = torch.ones(4100), 4100
    found, _ = codecs.largest(x, k)
    payload = torch.zeros(elias_fano_nbytes(n, k), dtype=torch.uint8)
    codecs.places_encode(found, n, payload)
    codecs.places_decode(payload, n, k)
    assert len(compiled) == 5
