"""Stages of the kit: each takes some part of commlib to the device and returns rows of what it found."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from commlib.bench.codec.command import measure
from commlib.bench.lab import unavailable
from commlib.bench.launch.processes import cores, run_ranks
from commlib.bench.results.table import Row
from commlib.bench.training.configurations import choose
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.registry import make

from .worker import RanksJob, main

CODECS = ("none", "fp16", "bf16", "int8", "int4", "onebit", "sign", "qsgd", "ternary", "topk:ratio=0.01", "powersgd")
ROUTES = ("none", "auto", "factors", "owners", "fp16", "int8", "onebit", "topk:ratio=0.01", "powersgd:rank=4")
FEW = ("none", "factors", "int8", "onebit", "powersgd:rank=4")
TESTS = Path(__file__).resolve().parents[2] / "tests"


class Skipped(Exception):
    """A stage that cannot be here; the message says why, and what would help."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the kit.

    Args:
        name: for ``--stage``.
        about: a heading.
        limit_s: seconds it may take on a GPU.
        run: (device, seconds) → rows; raises :class:`Skipped`.
    """

    name: str
    about: str
    limit_s: float
    run: Callable[[str, float], list[Row]]


def kernels(device: str, limit_s: float) -> list[Row]:
    """Tests that are marked gpu: kernels against the reference, to the last bit, and training over backends.

    Without a GPU, the kernels in Triton's interpreter.
    """
    if device == "cpu":
        raise Skipped("there is no GPU here; these tests need one")
    if not TESTS.is_dir():
        raise Skipped("the tests are not here: run the kit in a checkout of commlib")
    here = [p for p in TESTS.rglob("test_*.py") if "docs" not in p.parts]  # commands of the docs: this is one of them
    marked = [p for p in here if "mark.gpu" in p.read_text(encoding="utf-8")]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=short", "-n", str(min(12, cores()))]
    tier = ["-m", "gpu", *map(str, sorted(marked))]
    if device == "simulated":
        tier = ["-m", "not gpu", str(TESTS / "compressors" / "kernels" / "gpu")]
    command = [sys.executable, "-m", "pytest", *options, *tier]
    done = _run(command, limit_s, cwd=TESTS.parent)
    tally = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    if not tally:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    which = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    failed = tally.get("failed", 0) + tally.get("error", 0)
    return [{"passed": tally.get("passed", 0), "failed": failed, "which": ", ".join(which) or None}]


def codecs(device: str, limit_s: float, numel: int = 1 << 26) -> list[Row]:
    """Each codec against a copy of the same gradient on the device.

    ``of_copy``: the bytes that it must read and write at least, over those that a copy moves in the same time.
    """
    numel = numel if device == "cuda" else 1 << 16
    rows: list[Row] = []
    for name in CODECS:
        codec = make(name)
        for row in measure(codec, numel, torch.float32, torch.device(device), repeat=11):
            seconds, multiple = float(str(row["seconds"])), float(str(row["copy_multiple"]))
            coded = float(str(row["bits_per_value"])) / 8 * numel
            carried = isinstance(codec, ErrorFeedback) and row["op"] == "compress"
            floor = coded + (12 if carried else 4 if row["op"] == "compress" else 8) * numel
            share = floor / (8 * numel) / multiple
            shown = {"codec": name, "op": row["op"], "kernels": row["kernels"], "ms": seconds * 1e3}
            rows.append({**shown, "gb_per_s": row["gb_per_s"], "of_copy": share})
    return rows


def one_rank(device: str, limit_s: float) -> list[Row]:
    """Steps of a GPT with one rank over NCCL: what a route costs where nothing has to be sent."""
    return _ranks(device, 1, ROUTES if device == "cuda" else FEW, limit_s)


def ranks(device: str, limit_s: float) -> list[Row]:
    """Steps of a GPT with two ranks on one GPU over NCCL, to which each is a host of its own."""
    return _ranks(device, 2, ROUTES if device == "cuda" else FEW, limit_s)


def sanitizer(device: str, limit_s: float) -> list[Row]:
    """Steps of two ranks under PyTorch's CUDA sanitizer, which ends a rank whose streams race.

    A simulated accelerator is a sanitizer itself, in all steps of ranks.
    """
    if device == "cpu":
        raise Skipped("there is no GPU here, whose streams it watches")
    return _ranks(device, 2, FEW, limit_s, {"TORCH_CUDA_SANITIZER": "1"}, steps=2)


def links(device: str, limit_s: float) -> list[Row]:
    """Training on four emulated hosts at 1 Gbit/s, over NCCL, interleaved with DDP and PyTorch's hooks."""
    if (reason := unavailable()) is not None:
        raise Skipped(reason)
    backend = "nccl" if device == "cuda" else "gloo"
    model, rounds = ("gpt", "3") if device == "cuda" else ("gpt-small", "1")
    only = ("torch-fp16", "torch-powersgd", "auto", "fp16", "int8", "onebit", "topk:ratio=0.01", "powersgd:rank=4")
    command = ["-m", "commlib", "bench", "train", "--backend", backend, "--hosts", "4", "--rate", "1gbit", "--model"]
    rest = [model, "--rounds", rounds, "--steps", "3", "--json"]
    done = _run([sys.executable, *command, *rest, *(o for name in only for o in ("--only", name))], limit_s)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    keep = ("route", "step_s", "vs_ddp", "socket_bytes", "loss_ok", "status")
    return [{k: v for k, v in json.loads(line).items() if k in keep} for line in done.stdout.splitlines()]


STAGES: Sequence[Stage] = (
    Stage("kernels", "tests that need a GPU", 180, kernels),
    Stage("codecs", "codecs against a copy on the device", 60, codecs),
    Stage("one-rank", "one rank: what a route costs", 60, one_rank),
    Stage("ranks", "two ranks on one GPU", 60, ranks),
    Stage("sanitizer", "two ranks under PyTorch's CUDA sanitizer", 60, sanitizer),
    Stage("links", "four emulated hosts at 1 Gbit/s", 180, links),
)


def _ranks(
    device: str, size: int, routes: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None, steps: int = 10
) -> list[Row]:
    model = "gpt" if device == "cuda" else "gpt-small"
    job = RanksJob(model, choose(routes, routes, 2), device, steps if device == "cuda" else 2)
    rows: list[Row] = run_ranks(main, size, [job], env=lambda rank: env or {}, timeout=limit_s)[0]
    return rows


def _run(command: Sequence[str], limit_s: float, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, cwd=cwd, env=env)
