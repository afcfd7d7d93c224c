"""Body of one rank: joins the others, trains every codec with every seed, reports."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from commlib.bench.launch.child import tell
from commlib.bench.launch.gpus import take_gpu, visible
from commlib.bench.launch.processes import cores

from .ddp_run import DdpRun
from .local_sgd_run import LocalRun
from .run_specs import LOCAL_PREFIX, SERVER_PREFIX
from .server_run import ServedRun
from .settings import TrainSettings
from .tasks import BadInput, load_task

_TELL_EVERY_S = 0.05


@dataclasses.dataclass(frozen=True)
class RunProgress:
    """How far a run is: the codec, the seed, steps done and steps in all."""

    comm: str
    seed: int
    step: int
    total: int


def main(settings: TrainSettings) -> dict[str, Any]:
    """Run all of it; every rank returns the same kind of report, JSON values only (rank 0's is the one shown).

    Expects the environment torchrun or :func:`commlib.bench.launch.processes.run_ranks` provides.

    Raises:
        BadInput: the data or the device is not as the flags say.
        CommlibError: missing packages, checkpoints that do not fit, ranks that drifted apart.
    """
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    device, backend = place(settings.device, local, local_ranks)
    torch.set_num_threads(max(1, cores() // local_ranks))
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits in every run
        torch.backends.cudnn.deterministic = True
        take_gpu()
    if settings.limit is not None and device.type != "cpu":
        raise BadInput("--limit is kept on the host, for gradients on the CPU: add --device cpu, or leave it out")
    task = load_task(settings.task, settings.data, settings.hidden).to(device)
    dist.init_process_group(backend)
    if backend == "gloo":
        dist.barrier()  # all are connected before one can fail: or Gloo would have its say between our lines
    results, parameters, batch, steps = [], 0, 0, 0
    for comm in settings.runs:
        for seed in settings.seeds:
            run = _kind(comm)(settings, task, comm, seed, device)
            result = run.train(_Teller(comm, seed))
            results.append(dataclasses.asdict(result))
            parameters, batch, steps = run.parameters, run.recipe.batch, result.steps
    return {
        "task": settings.task,
        "ranks": ranks,
        "backend": backend,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
        "parameters": parameters,
        "batch_per_rank": batch,
        "steps": steps,
        "limit": settings.limit,
        "hierarchy": settings.hierarchy,
        "train_examples": len(task.train[0]),
        "test_examples": len(task.test[0]),
        "runs": results,
    }


def place(device: str, local_rank: int, local_ranks: int) -> tuple[torch.device, str]:
    """The device and the backend of a rank.

    ``auto`` takes CUDA with NCCL where every rank of this machine finds a GPU of its own, else the CPU with
    Gloo. ``cuda`` with more ranks than GPUs shares them (:mod:`commlib.bench.launch.gpus`).

    Raises:
        BadInput: ``cuda`` without a GPU.
    """
    gpus = visible()
    if device == "cuda" and gpus == 0:
        raise BadInput("--device cuda: torch sees no GPU here; use --device cpu")
    if device == "cpu" or gpus == 0 or (device == "auto" and local_ranks > gpus):
        return torch.device("cpu"), "gloo"
    return torch.device("cuda", local_rank % gpus), "nccl" if dist.is_nccl_available() else "gloo"


def _kind(comm: str) -> type[DdpRun]:
    if comm.startswith(LOCAL_PREFIX):
        return LocalRun
    return ServedRun if comm.startswith(SERVER_PREFIX) else DdpRun


class _Teller:
    """Tells the parent how far a run is, a few times a second."""

    def __init__(self, comm: str, seed: int) -> None:
        self._run = (comm, seed)
        self._next = 0.0

    def __call__(self, step: int, total: int) -> None:
        now = time.monotonic()
        if dist.get_rank() == 0 and (now >= self._next or step == total):
            self._next = now + _TELL_EVERY_S
            tell(RunProgress(*self._run, step, total))
