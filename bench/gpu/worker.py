"""Job of the kit's ranks: train with each configuration in turn, and look at what only a GPU can show.

That is whether replicas stay equal, whether an exact route leaves what DDP leaves, how often a steady step makes the
host wait for the device, and the memory at its peak.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import hashlib
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commlib.bench.launch.gpus import take_gpu
from commlib.bench.results.table import Row
from commlib.bench.training.configurations import Configuration
from commlib.bench.training.models import MODELS
from commlib.bench.training.trial import short
from commlib.bench.training.workloads import Training
from commlib.testing.accelerator import SimulatedAccelerator

_WARM_UP = 6  # steps: DDP rebuilds its buckets, and kernels are compiled
_FEW = 3  # where nothing is compiled
_PATIENCE = datetime.timedelta(seconds=60)


@dataclasses.dataclass(frozen=True)
class RanksJob:
    """Job of the ranks.

    Args:
        model: a name of MODELS.
        contenders: DDP first.
        device: ``cuda``, over NCCL; ``cpu``, over Gloo; or ``simulated``, by NCCL's rules on a simulated accelerator.
        steps: timed ones of each.
    """

    model: str
    contenders: Sequence[Configuration]
    device: str
    steps: int


def main(job: RanksJob) -> list[Row]:
    """Train with all of them; the same rows on every rank, in the order of the contenders.

    A route that fails is a row whose status says how; DDP has to come through. The environment is torchrun's.
    """
    if job.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits in every run
        torch.backends.cudnn.deterministic = True
    device = take_gpu() if job.device == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo", timeout=_PATIENCE)
    rows: list[Row] = []
    baseline: dict[str, Any] = {}
    for contender in job.contenders:
        found: dict[str, Any] = {"route": contender.name}
        found |= dict.fromkeys(("step_ms", "vs_ddp", "host_waits", "peak_mib", "over_ddp_mib", "replicas", "weights"))
        found["status"] = "ok"
        try:
            found |= _train(contender, job, device)
        except Exception as e:  # of all ranks alike, for all ranks do the same
            if not baseline:
                raise  # there is nothing to compare with
            found["status"] = short(e)
        else:
            baseline = baseline or dict(found)
            found["vs_ddp"] = baseline["step_ms"] / found["step_ms"]
            if found["peak_mib"] is not None:
                found["over_ddp_mib"] = found["peak_mib"] - baseline["peak_mib"]
            found["weights"] = "as DDP's" if found["weights"] == baseline["weights"] else "others"
        rows.append(found)
    return rows


def _train(contender: Configuration, job: RanksJob, device: torch.device) -> dict[str, Any]:
    gc.collect()  # a model that was attached to is part of a cycle: the one before shall not count here
    if job.device == "simulated":
        from commlib.transports.process_group import stream_ordered  # it loads torch._dynamo, a second

        with stream_ordered.device() as (gpu, group):
            found, course = _over(group, contender, job, device, gpu)
            gpu.wait(device)
    else:
        found, course = _over(dist.new_group(timeout=_PATIENCE), contender, job, device, None)
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, _digest(course.module))
    return {**found, "replicas": "equal" if len(set(digests)) == 1 else "differ", "weights": digests[0]}


def _over(
    group: Any, contender: Configuration, job: RanksJob, device: torch.device, gpu: SimulatedAccelerator | None
) -> tuple[dict[str, Any], Training]:
    course = Training(job.model, MODELS[job.model].batch, device)
    model, comm = contender.wrap(course, group, _PATIENCE.total_seconds())
    try:
        found = _measured(course, model, job.steps, device, gpu)
        with torch._C._DisableTorchDispatch():  # no work of a simulated device
            dist.barrier()  # nobody takes the group down while another rank is in its last step
        return found, course
    finally:
        if comm is not None:
            comm.close()
        dist.destroy_process_group(group)


def _measured(
    course: Training, model: nn.Module, steps: int, device: torch.device, gpu: SimulatedAccelerator | None
) -> dict[str, Any]:
    cuda = device.type == "cuda"
    for _ in range(_WARM_UP if gpu is None else _FEW):
        course.step(model)
    if gpu is not None:
        gpu.waits.clear()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        course.step(model)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    waits = _host_waits(course, model) if cuda else None if gpu is None else len(gpu.waits) / steps
    return {"step_ms": statistics.median(seconds) * 1e3, "host_waits": waits, "peak_mib": peak}


def _host_waits(course: Training, model: nn.Module, steps: int = 3) -> float:
    """How often a step makes the host wait for the device, by PyTorch's own watch."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                course.step(model)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in seen) / steps


def _digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for p in module.parameters():
        digest.update(p.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
