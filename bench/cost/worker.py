"""Body of one rank of ``commlib bench cost``: one route, from its attaching to some steps, in a process of its own."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commlib.bench.models.shapes import Layers
from commlib.bench.models.simulated import Replay
from commlib.bench.training.configurations import Configuration

BEGIN = 3
"""Steps that are no later ones: DDP rebuilds its buckets in the second, PyTorch's PowerSGD begins with the third."""

_PATIENT_S = 120.0
_ROLLUP = Path("/proc/self/smaps_rollup")
_OWN = ("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:")


@dataclasses.dataclass(frozen=True)
class CostJob:
    """Job of the ranks: one route over the layers of a model that computes nothing.

    Args:
        layers: (name, shape) of every parameter.
        contender: the route.
        steps: after the first :data:`BEGIN`.
        bucket_cap_mb: size of DDP's buckets in MiB; None is DDP's own.
    """

    layers: Layers
    contender: Configuration
    steps: int
    bucket_cap_mb: float | None


@dataclasses.dataclass(frozen=True)
class CostSheet:
    """Figures of one run; of each the largest of the ranks'.

    Args:
        attach_s: until it is attached.
        first_s: the first step.
        step_s: the median of the later ones.
        cpu_s: of all threads of a process in a later step, the median.
        held: bytes of memory that are this process's alone after the steps; None where the system does not say.
    """

    attach_s: float
    first_s: float
    step_s: float
    cpu_s: float
    held: int | None


def main(job: CostJob) -> CostSheet:
    """Attach the route, and train. Collective; the environment is torchrun's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(Replay(job.layers), init_sync=False, bucket_cap_mb=job.bucket_cap_mb)
    dist.barrier()
    began = time.perf_counter()
    comm = job.contender.put_on(ddp, ddp.process_group, _PATIENT_S)
    attached = time.perf_counter() - began
    steps = [_step(ddp) for _ in range(BEGIN + job.steps)]
    held = _held()
    if comm is not None:
        comm.close()
    wall, cpu = (sorted(column)[job.steps // 2] for column in zip(*steps[BEGIN:], strict=True))
    sheets = [CostSheet(attached, steps[0][0], wall, cpu, held)] * dist.get_world_size()
    dist.all_gather_object(sheets, sheets[0])
    told = [s.held for s in sheets if s.held is not None]
    return CostSheet(
        max(s.attach_s for s in sheets),
        max(s.first_s for s in sheets),
        max(s.step_s for s in sheets),
        max(s.cpu_s for s in sheets),
        max(told) if told else None,
    )


def _step(ddp: DistributedDataParallel) -> tuple[float, float]:
    """(Seconds, seconds of this process's cores) of a step."""
    ddp.zero_grad()
    dist.barrier()
    began, cores = time.perf_counter(), time.process_time()
    ddp().backward()
    return time.perf_counter() - began, time.process_time() - cores


def _held() -> int | None:
    """Bytes of memory that no other process has, too: libraries that ranks share are not counted."""
    try:
        lines = [line.split() for line in _ROLLUP.read_text().splitlines()]
    except OSError:
        return None
    return 1024 * sum(int(line[1]) for line in lines if line[0] in _OWN)
