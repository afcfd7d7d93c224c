"""``commlib doctor``: what this machine has, what it lacks, and the line that installs it.

Whether two processes on this machine can all-reduce: the smallest thing that must work.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import platform
import sys
import tempfile
import time
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, TypedDict

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from commlib.codecs.registry import compressors, load
from commlib.errors import MissingDependency
from commlib.messaging.network import Network, network


class SelfTest(TypedDict):
    """How it went; ``detail`` says why it did not."""

    ok: bool
    seconds: float
    detail: str


def all_reduce_between_two(deadline: float) -> SelfTest:
    """All-reduce eight values between two spawned Gloo processes; none outlives the call.

    They meet through a file, so no port is taken but Gloo's own.

    Args:
        deadline: seconds for everything, the start of the processes included.
    """
    began = time.monotonic()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        ends = [context.Pipe(duplex=False) for _ in range(2)]
        processes = [
            context.Process(target=_rank, args=(rank, meeting, deadline, sender), daemon=True)
            for rank, (_, sender) in enumerate(ends)
        ]
        try:
            for process, (_, sender) in zip(processes, ends, strict=True):
                process.start()
                sender.close()  # the child has it: if it dies, our end reads end-of-file
            troubles = _answers([receiver for receiver, _ in ends], began + deadline, deadline)
        finally:
            for process, (receiver, _) in zip(processes, ends, strict=True):
                receiver.close()
                if process.pid is not None:
                    process.kill()
                    process.join()
    detail = "; ".join(f"rank {r}: {t}" for r, t in enumerate(troubles) if t)
    return {"ok": not detail, "seconds": round(time.monotonic() - began, 3), "detail": detail}


def _answers(receivers: list[Connection], end: float, deadline: float) -> list[str]:
    """Faults that each rank reports ("" is none)."""
    troubles = dict.fromkeys(receivers, f"no answer within {deadline:g} s")
    waiting = set(receivers)
    while waiting and (left := end - time.monotonic()) > 0:
        for ready in wait(list(waiting), timeout=left):
            receiver = next(r for r in receivers if r is ready)
            try:
                troubles[receiver] = receiver.recv()
            except EOFError:
                troubles[receiver] = "the process died without a word"
            waiting.discard(receiver)
    return [troubles[r] for r in receivers]


def _rank(rank: int, meeting: str, deadline: float, answer: Connection) -> None:
    """Body of one of the two processes that all-reduce."""
    try:
        torch.set_num_threads(1)
        timeout = timedelta(seconds=deadline)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timeout)
        x = torch.full((8,), float(rank + 1), dtype=torch.float32)
        dist.all_reduce(x)
        wrong = bool((x != 3.0).any())
        answer.send(f"1 + 2 gave {x.tolist()}" if wrong else "")
        dist.destroy_process_group()
    except Exception as e:  # whatever it is, the parent reports it
        answer.send(f"{type(e).__name__}: {e}")


_REQUIRED = ("torch", "torch-commlib", "numpy", "msgpack", "pyzmq", "rich", "typer")
_OPTIONAL = {  # distribution → (what it is for, how to get it)
    "numba": ("compiled codecs on the CPU: many times faster", 'pip install "torch-commlib[numba]"'),
    "scikit-learn": ("data of `commlib train --task digits`", 'pip install "torch-commlib[examples]"'),
}


class Host(TypedDict):
    """The processor and the memory."""

    system: str
    cores: int
    usable_cores: int
    torch_threads: int
    memory_gib: float | None
    available_gib: float | None


class Problem(TypedDict):
    """Something missing or broken, and what mends it."""

    what: str
    fix: str
    required: bool


class DoctorReport(TypedDict):
    """Report that ``commlib doctor --json`` prints. ``ok`` is false if something required is broken."""

    ok: bool
    versions: dict[str, str | None]
    backends: dict[str, bool]
    cuda: list[str]
    host: Host
    network: Network
    compressors: dict[str, str | None]
    selftest: SelfTest | None
    problems: list[Problem]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    selftest: Annotated[bool, typer.Option(help="All-reduce between two local Gloo processes.")] = True,
    deadline: Annotated[float, typer.Option(min=1.0, help="Seconds the self-test may take.")] = 60.0,
) -> None:
    """Show what this machine has and lacks; exit with 1 if something required is broken."""
    report = examine(deadline if selftest else None)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    if not report["ok"]:
        raise typer.Exit(1)


def examine(deadline: float | None) -> DoctorReport:
    """Look at everything; run the self-test within ``deadline`` seconds, or not at all if None."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    backends = _backends()
    codecs = {name: _codec_trouble(name) for name in compressors()}
    nics = network()
    tested = all_reduce_between_two(deadline) if deadline is not None and backends["gloo"] else None
    problems = [
        *_package_problems(versions),
        *_distributed_problems(backends, nics, tested),
        *(_problem(f"codec {k} cannot be loaded", f"{v}") for k, v in codecs.items() if v is not None),
    ]
    return {
        "ok": not any(p["required"] for p in problems),
        "versions": versions,
        "backends": backends,
        "cuda": _gpus(),
        "host": _host(),
        "network": nics,
        "compressors": codecs,
        "selftest": tested,
        "problems": problems,
    }


# -- what is there --------------------------------------------------------------------------------


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _backends() -> dict[str, bool]:
    there = dist.is_available()
    return {
        "gloo": there and dist.is_gloo_available(),
        "nccl": there and dist.is_nccl_available(),
        "mpi": there and dist.is_mpi_available(),
        "ucc": there and dist.is_ucc_available(),
    }


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{p.name}, {p.total_memory / 2**30:.0f} GiB" for p in found]


def _host() -> Host:
    memory: dict[str, float] = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            memory = {k: int(v.split()[0]) / 2**20 for k, v in (line.split(":") for line in f)}  # kB → GiB
    except OSError:
        pass  # not Linux: reported as unknown
    cores = os.cpu_count() or 1
    return {
        "system": platform.platform(),
        "cores": cores,
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores,
        "torch_threads": torch.get_num_threads(),
        "memory_gib": _rounded(memory.get("MemTotal")),
        "available_gib": _rounded(memory.get("MemAvailable")),
    }


def _rounded(x: float | None) -> float | None:
    return None if x is None else round(x, 1)


def _codec_trouble(name: str) -> str | None:
    try:
        load(name)
    except (MissingDependency, TypeError) as e:
        return str(e)
    return None


# -- what is wrong --------------------------------------------------------------------------------


def _problem(what: str, fix: str, *, required: bool = False) -> Problem:
    return {"what": what, "fix": fix, "required": required}


def _package_problems(versions: dict[str, str | None]) -> list[Problem]:
    needed = [
        _problem(f"{name} is not installed", f"pip install {name}", required=True)
        for name in _REQUIRED
        if versions[name] is None
    ]
    useful = [
        _problem(f"{name} is not installed ({use})", how)
        for name, (use, how) in _OPTIONAL.items()
        if versions[name] is None
    ]
    return needed + useful


def _distributed_problems(backends: dict[str, bool], nics: Network, tested: SelfTest | None) -> list[Problem]:
    found = []
    if not backends["gloo"]:
        what = "this torch has no Gloo, so processes on CPUs cannot exchange anything"
        found.append(_problem(what, "pip install torch from https://pytorch.org/get-started", required=True))
    if torch.cuda.is_available() and not backends["nccl"]:
        what = "there is a GPU but this torch has no NCCL: gradients would travel through the CPU"
        found.append(_problem(what, "pip install torch (a CUDA build for Linux)"))
    known = ", ".join(nics["interfaces"])
    for backend, choice in (("GLOO", nics["gloo"]), ("NCCL", nics["nccl"])):
        variable = f"{backend}_SOCKET_IFNAME"
        if (wanted := os.environ.get(variable)) and choice is None:
            what = f"{variable}={wanted} names no usable interface (known: {known})"
            found.append(_problem(what, f"unset {variable}", required=backends[backend.lower()]))
    if tested is not None and not tested["ok"]:
        fix = "GLOO_SOCKET_IFNAME=lo commlib doctor   # if that passes, name your interface there instead of lo"
        found.append(_problem(f"two local Gloo processes cannot all-reduce: {tested['detail']}", fix, required=True))
    return found


# -- for people -----------------------------------------------------------------------------------


def _print(report: DoctorReport) -> None:
    out = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    host, nics, tested = report["host"], report["network"], report["selftest"]
    table = Table(show_header=False, box=None)
    table.add_row("versions", ", ".join(f"{k} {v}" for k, v in report["versions"].items() if v is not None))
    table.add_row("backends", ", ".join(f"{k} {'yes' if v else 'no'}" for k, v in report["backends"].items()))
    table.add_row("GPUs", "; ".join(report["cuda"]) or "none")
    cores = f"{host['usable_cores']} of {host['cores']} cores usable, {host['torch_threads']} torch threads"
    memory = f"{host['available_gib']} of {host['memory_gib']} GiB free" if host["memory_gib"] else "memory unknown"
    table.add_row("machine", f"{host['system']}, {cores}, {memory}")
    for name, nic in nics["interfaces"].items():
        speed = "speed unknown" if nic["mbit"] is None else f"{nic['mbit']} Mbit/s"
        addresses = ", ".join(nic["addresses"]) or "no address"
        table.add_row(f"interface {name}", f"{addresses}, {speed}, {'up' if nic['up'] else 'down'}")
    table.add_row("Gloo would use", nics["gloo"] or "nothing it can find")
    table.add_row("NCCL would use", nics["nccl"] or "nothing it can find")
    table.add_row("codecs", ", ".join(k for k, v in report["compressors"].items() if v is None) or "none")
    if tested is not None:
        verdict = f"ok in {tested['seconds']:.1f} s" if tested["ok"] else f"FAILED: {tested['detail']}"
        table.add_row("self-test", f"two Gloo processes all-reduce: {verdict}")
    out.print(table)
    for problem in report["problems"]:
        out.print(f"\n{'BROKEN ' if problem['required'] else 'missing'}  {problem['what']}\n         {problem['fix']}")
    out.print("\neverything required works" if report["ok"] else "\nsomething required is broken, see above")
