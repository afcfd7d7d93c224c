"""Trial of a configuration: a fresh model and a fresh process group, some steps to warm up, some timed."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from commlib.bench.launch.child import tell
from commlib.bench.launch.gpus import take_gpu
from commlib.bench.results.record import levels_of
from commlib.bench.results.socket_counters import SocketCounters, traffic
from commlib.ddp.state import HookState

from .configurations import Configuration
from .correctness import Evidence
from .schedule import TrainingTrial, TrialOutcome
from .workloads import Replaying, Training, Workload

_SETTLING = 400  # steps, at most, in which a bandwidth manager may make up its mind
WARM_UP = 2  # steps: DDP rebuilds its buckets in the second, PyTorch's PowerSGD does not compress before the third
_PART = 0.7  # of a visit's limit: so long may one collective take, so that most hangs end by an error
_WORDS = 100  # characters of an error that are kept
_WRAPPING = re.compile(r"^(\w+: )?Got the following error when running the callback: ")  # once for every `then`


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """Job of the ranks: what holds for all trials of a model.

    Args:
        model: a name of MODELS.
        contenders: the baseline first.
        steps: timed ones in a visit, at least.
        batch: examples for each rank and step.
        backward_s: seconds the simulated backward pass takes; None: the model is real.
        backend: gloo or nccl.
        buckets: options of DDP's, as it names them.
    """

    model: str
    contenders: Sequence[Configuration]
    steps: int
    batch: int
    backward_s: float | None
    backend: str
    buckets: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Message of any rank: why its part of a visit failed."""

    visit: TrainingTrial
    text: str


@dataclasses.dataclass
class _Sheet:
    """Notes of one rank in a visit."""

    steps_s: list[float] = dataclasses.field(default_factory=list)
    sent_bytes: float | None = None
    predicted_s: float | None = None
    levels: str | None = None
    evidence: Evidence | None = None
    error: str | None = None
    ended: float = 0.0


def run_visit(visit: TrainingTrial, job: TrainingJob, device: torch.device, limit_s: float, steps: int) -> TrialOutcome:
    """Let a contender train. Collective; every rank gets the same outcome.

    A rank in which it fails waits for the others to fail too. The caller watches over the time.

    Args:
        visit: whose turn it is.
        job: the race.
        device: of this rank.
        limit_s: after which the caller will end this process.
        steps: timed ones, at least the job's. The evidence is taken after the job's, so it is of as many for all.
    """
    began = time.monotonic()
    contender = next(c for c in job.contenders if c.name == visit.name)
    group = dist.new_group(timeout=datetime.timedelta(seconds=_PART * limit_s))
    sheet, end = _Sheet(), _Ending()
    try:
        _train(contender, job, device, group, limit_s, steps, sheet, end)
    except Exception as e:
        sheet.error = short(e)
        tell(Trouble(visit, sheet.error))
    sheet.ended = time.monotonic() - began
    sheets: list[_Sheet] = [sheet] * dist.get_world_size()
    dist.all_gather_object(sheets, sheet)
    end()
    gc.collect()  # DDP and FSDP2 are cycles: Gloo threads that outlive the group abort at exit (pytorch#179291)
    dist.destroy_process_group(group)
    return _outcome(visit, sheets)


class _Ending:
    """Call that is due when the visit is over, whether or not it came that far."""

    def __init__(self) -> None:
        self.call: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self.call()


def _train(
    contender: Configuration,
    job: TrainingJob,
    device: torch.device,
    group: Any,
    limit_s: float,
    steps: int,
    sheet: _Sheet,
    end: _Ending,
) -> None:
    course: Workload
    if job.backward_s is None:
        course = Training(job.model, job.batch, device)
    else:
        course = Replaying(job.model, job.backward_s, device, job.batch)
    model, comm = contender.wrap(course, group, limit_s, job.buckets)
    if comm is not None:
        end.call = comm.close
    if isinstance(comm, HookState):
        sheet.levels = levels_of(comm.plan) if contender.hierarchy else None
    if comm is not None and contender.managed:
        for _ in range(_SETTLING):
            if comm.settled:
                break
            course.step(model)
        course.restart()
    for _ in range(WARM_UP):
        course.step(model)
        course.look()
    before = _counted(group)
    sheet.steps_s = [_timed_step(course, model, device) for _ in range(job.steps)]
    after = _counted(group)
    if before is not None and after is not None:
        sheet.sent_bytes = (after - before).sent / job.steps
    sheet.predicted_s = None if comm is None else comm.predicted_s
    sheet.evidence = course.evidence()
    sheet.steps_s += [_timed_step(course, model, device) for _ in range(steps - job.steps)]


def _timed_step(course: Workload, model: nn.Module, device: torch.device) -> float:
    start = time.perf_counter()
    course.step(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    course.look()
    return seconds


def _counted(group: Any) -> SocketCounters | None:
    """This process's traffic so far, when all ranks have sent and received all of the step."""
    dist.barrier(group)
    return traffic()


def _outcome(visit: TrainingTrial, sheets: Sequence[_Sheet]) -> TrialOutcome:
    seconds = max(s.ended for s in sheets)
    errors = {rank: s.error for rank, s in enumerate(sheets) if s.error is not None}
    if errors:
        rank, text = next(iter(errors.items()))
        where = "" if len(errors) == len(sheets) else f"rank {rank}: "
        return TrialOutcome(visit, seconds, error=where + text)
    slowest = tuple(max(times) for times in zip(*(s.steps_s for s in sheets), strict=True))
    first = sheets[0]
    found = TrialOutcome(visit, seconds, slowest, first.sent_bytes, first.evidence)
    return dataclasses.replace(found, predicted_s=first.predicted_s, levels=first.levels)


def short(error: BaseException) -> str:
    """An error's type and first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    while wrapped := _WRAPPING.match(text.partition(": ")[2]):
        text = text.partition(": ")[2][wrapped.end() :]
    return text if len(text) <= _WORDS else f"{text[: _WORDS - 1]}…"


def device_of(backend: str) -> torch.device:
    """Where this rank's model lives: the CPU with Gloo, a GPU with NCCL."""
    return take_gpu() if backend == "nccl" else torch.device("cpu")
