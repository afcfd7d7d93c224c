"""``commlib bench codec``: speed, error and size of the codecs on this device.

A codec's floor is memory traffic, so its time is also given as a multiple of the time that a plain
copy of the same gradient takes. Copy, compress and decompress are timed in turn, round after
round, so that a machine that slows down slows all three; each figure is the median of its rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Annotated

import torch
import typer
from torch import Tensor

from commlib.bench.codec.torch_hooks import alone
from commlib.bench.codec.torch_hooks import peers as hooks
from commlib.bench.options import Json, Save
from commlib.bench.progress import Bar
from commlib.bench.results.record import Record, emit, facts
from commlib.bench.results.table import Row
from commlib.codecs.base import Compressor, LayerSpec, Memory
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.registry import compressors, make
from commlib.errors import MissingDependency

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def codec(
    codecs: Annotated[
        list[str] | None, typer.Option("--codec", help="Spec string, as topk:ratio=0.01; repeat it. [all]")
    ] = None,
    numel: Annotated[list[int] | None, typer.Option(help="Values in the gradient; repeat it. [1048576]")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; lossy codecs convert, on the clock.")] = (
        "float32"
    ),
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1…; auto takes the GPU if there is one.")] = "auto",
    repeat: Annotated[int | None, typer.Option(min=1, help="Timed rounds; the median counts. [11]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="torch's threads; our loops use one. [all]")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="PyTorch's fp16, int8 and PowerSGD hooks, too.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="65536 values and 5 rounds where not said otherwise.")] = False,
    as_json: Json = False,
    save: Save = None,
) -> None:
    """Speed, error and size of codecs on one gradient.

    Compress includes the error feedback the codec has by default; decompress_add adds into a buffer,
    as a receiver does. GB/s count the bytes of the gradient, not of the payload; copy_multiple is the
    time over that of a plain copy of it. error is δ = 1 − ‖x − C(x)‖²/‖x‖² of one shot at a normal
    vector without feedback (1 is lossless).
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    where = pick_device(device)
    if peers and where.type != "cpu":
        raise ValueError(f"--peers times PyTorch's hooks over Gloo on the CPU, not on {where}: add --device cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    sizes = numel or [1 << 16 if quick else 1 << 20]
    rounds = repeat or (5 if quick else 11)
    rows: list[Row] = []
    every = [(c, n) for c in [*(codecs or compressors()), *(["PyTorch's hooks"] if peers else [])] for n in sizes]
    with Bar("codecs", len(every)) as bar:
        for done, (name, n) in enumerate(every):
            bar.show(done=done, text=f"{name}, {n} values")
            if name == "PyTorch's hooks":
                rows += measure_peers(n, repeat=rounds)
                continue
            try:
                built = make(name)
            except MissingDependency as e:
                if codecs:
                    raise
                typer.echo(f"{name} left out: {e}", err=True)
                continue
            rows += measure(built, n, _DTYPES[dtype], where, repeat=rounds)
    record = Record("codec", facts(threads=torch.get_num_threads(), repeat=rounds), rows)
    title = f"codecs on {where}, {torch.get_num_threads()} threads, median of {rounds}"
    emit(record, title=title, as_json=as_json, save=save)


def pick_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the first GPU if there is one.

    Raises:
        ValueError: no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"device {name!r} cannot be used: {str(e).splitlines()[0]}; try auto or cpu") from e
    return torch.device(name)


def measure(
    codec: Compressor, numel: int, dtype: torch.dtype, device: torch.device, *, repeat: int
) -> list[dict[str, object]]:
    """Two rows, ``compress`` and ``decompress_add``, for a standard normal gradient.

    Args:
        codec: with its error feedback around it, if it is to be timed with it.
        numel: values; they are given to the codec as the squarest matrix of that many.
        dtype: of the gradient; lossy codecs see a float32 copy made in the timed part.
        device: where it lives.
        repeat: timed rounds, after one that is not.

    Raises:
        ValueError: ``numel`` is not positive.
    """
    if numel < 1:
        raise ValueError(f"numel must be at least 1, got {numel}")
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).view(squarest(numel)).to(device, dtype)
    seen = x if codec.lossless else x.float()
    spec = LayerSpec.of(seen, "bench")
    payload = torch.zeros(codec.nbytes(spec), dtype=torch.uint8, device=device)
    out, copied = torch.zeros_like(seen), torch.empty_like(x)
    memory = Memory.zeros(codec, spec)

    def compress() -> None:
        codec.compress(x if codec.lossless else x.float(), payload, memory=memory, seed=1)

    def decompress_add() -> None:
        codec.decompress(payload, out, add=True, seed=1)

    ops = {"copy": lambda: copied.copy_(x), "compress": compress, "decompress_add": decompress_add}
    seconds = interleave(ops, device, repeat)
    shared = {
        "error": single_shot_delta(codec, seen),
        "bits_per_value": 8 * payload.numel() / numel,
    }
    return [
        {
            "codec": str(codec),
            "op": op,
            "numel": numel,
            "dtype": str(dtype).removeprefix("torch."),
            "device": str(device),
            "kernels": codec.kernels(seen),
            "seconds": seconds[op],
            "gb_per_s": numel * dtype.itemsize / seconds[op] / 1e9,
            "copy_multiple": seconds[op] / seconds["copy"],
            **shared,
        }
        for op in ("compress", "decompress_add")
    ]


def measure_peers(numel: int, *, repeat: int) -> list[dict[str, object]]:
    """A row for each of PyTorch's hooks, of which compressing and decompressing cannot be told apart."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).view(squarest(numel))
    copied = torch.empty_like(x)
    with alone():
        ops = {"copy": lambda: copied.copy_(x), **hooks(x)}
        seconds = interleave(ops, x.device, repeat)
    return [
        {
            "codec": name,
            "op": "compress+decompress",
            "numel": numel,
            "dtype": "float32",
            "device": "cpu",
            "kernels": "torch",
            "seconds": seconds[name],
            "gb_per_s": x.nbytes / seconds[name] / 1e9,
            "copy_multiple": seconds[name] / seconds["copy"],
            "error": None,
            "bits_per_value": None,
        }
        for name in ops
        if name != "copy"
    ]


def interleave(ops: Mapping[str, Callable[[], object]], device: torch.device, repeat: int) -> dict[str, float]:
    """Median seconds of every operation, all of them timed once in each round; one round warms up."""
    times: dict[str, list[float]] = {name: [] for name in ops}
    for _ in range(repeat + 1):
        for name, op in ops.items():
            _synchronise(device)
            start = time.perf_counter()
            op()
            _synchronise(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def single_shot_delta(codec: Compressor, x: Tensor) -> float:
    """δ := 1 − ‖x − C(x)‖²/‖x‖² of one compression without error feedback; 1 is lossless, below 0 is expansion."""
    plain = codec.inner if isinstance(codec, ErrorFeedback) else codec
    spec = LayerSpec.of(x, "bench")
    payload = torch.zeros(plain.nbytes(spec), dtype=torch.uint8, device=x.device)
    decoded = torch.zeros_like(x)
    plain.compress(x, payload, memory=Memory.zeros(plain, spec), seed=1)
    plain.decompress(payload, decoded, seed=1)
    exact = x.double()
    return 1.0 - float((exact - decoded.double()).square().sum() / exact.square().sum())


def squarest(numel: int) -> tuple[int, int]:
    """(rows, columns) with rows·columns = numel, rows ≤ columns, as nearly square as can be."""
    rows = next(r for r in range(math.isqrt(numel), 0, -1) if numel % r == 0)
    return rows, numel // rows


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
