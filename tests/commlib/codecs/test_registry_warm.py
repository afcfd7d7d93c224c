"""No step waits for a compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from commlib.codecs.base import LayerSpec, Memory
from commlib.codecs.registry import compressors, make, warm
from commlib.compressors.kernels.cpu import codecs

CPU = torch.device("cpu")


def signatures() -> dict[str, int]:
    """How many variants of each loop have been compiled or loaded."""
    assert codecs.name == "numba"
    modules = [m for name, m in sys.modules.items() if name.startswith("commlib.compressors.kernels.")]
    loops = {f"{m.__name__}.{k}": f for m in modules for k, f in vars(m).items() if hasattr(f, "nopython_signatures")}
    return {name: len(loop.nopython_signatures) for name, loop in loops.items()}


@pytest.mark.parametrize("name", [*compressors(), "topk:ratio=0.5,values=int8", "qsgd:ef=on", "fp16:ef=off"])
def test_after_it_nothing_is_compiled_whatever_a_layers_shape(name: str) -> None:
    codec = make(name)
    warm([codec], CPU)
    before = signatures()
    for shape in ((3, 1000), (5000,), (64, 3, 3, 3), (1,), (128, 512)):
        spec = LayerSpec("w", shape)
        if codec.refuse(spec) is not None:
            continue
        need, memory, x = codec.nbytes(spec), Memory.zeros(codec, spec), torch.randn(shape)
        whole = torch.zeros(3, -(-need // 8) * 8 + 16, dtype=torch.uint8)
        for rows in (whole[:, :need], torch.zeros(3, need, dtype=torch.uint8) if need % 8 == 0 else whole[:1, :need]):
            codec.compress(x, rows[0], memory=memory, seed=1)
            codec.decompress(rows[0], x, seed=1)
            codec.decompress_sum(rows[:1], x, seeds=[1])
            codec.decompress_sum(rows, x, scale=1 / 3, seeds=[1, 1, 1])
    assert signatures() == before


def test_a_codec_that_loses_nothing_is_not_touched() -> None:
    warm([make("none")], CPU)


def test_what_an_all_reduce_adds_up_without_a_residual_needs_no_compiled_loops() -> None:
    """They take 50 MB of each process."""
    code = (
        "import sys; from commlib.codecs.registry import make, warm; import torch; "
        "from commlib.planning.simulate import exchange_once; specs = sys.argv[1:]; "
        "warm([make(spec) for spec in specs], torch.device('cpu'), reduced=specs); "
        "[exchange_once(spec + '@dense', [torch.ones(200_000)] * 2) for spec in specs]; print('numba' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "fp16:ef=off", "bf16:ef=off"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
