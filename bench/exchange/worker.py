"""Body of one rank: measures the line, then visits the pairs in rounds until rounds or time are used up."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import time

import torch.distributed as dist

from commlib.bench.launch.child import tell
from commlib.bench.launch.gpus import take_gpu
from commlib.bench.link.worker import measure_line
from commlib.messaging.throughput import Stream

from .combinations import BASELINE, Pair
from .trial import ExchangeTrial, Refused, TrialSetting, largest, visit

_PATIENCE = datetime.timedelta(minutes=5)  # for one collective: then the others are taken for lost
_SHARE = 0.8  # of its part of the time left that a visit plans with: it may take longer than planned


@dataclasses.dataclass(frozen=True)
class ExchangeJob:
    """Job of the ranks: which pairs to measure, and for how long.

    Args:
        pairs: visited in this order in every round, the baseline first.
        rounds: at most.
        seconds: no visit begins later than so long after the start; but the baseline's first.
        backend: gloo or nccl.
    """

    setting: TrialSetting
    pairs: list[Pair]
    rounds: int
    seconds: float
    backend: str


@dataclasses.dataclass(frozen=True)
class Doing:
    """Message of rank 0: which visit begins now, and how many are planned at most."""

    pair: Pair
    number: int
    total: int


@dataclasses.dataclass
class ExchangeOutcome:
    """Outcome of a job: the raw line, the trials in order, and why pairs were left out."""

    line: Stream | None
    visits: list[ExchangeTrial]
    left_out: dict[Pair, str]
    planned: int


def main(job: ExchangeJob) -> ExchangeOutcome:
    """Run all of it; the same on every rank. The environment is torchrun's.

    Raises:
        CommlibError: a rank was lost, or the exchange of a pair failed half-way: then the ranks are out of step.
    """
    if job.backend == "nccl":
        job = dataclasses.replace(job, setting=dataclasses.replace(job.setting, device=str(take_gpu())))
    dist.init_process_group(job.backend, timeout=_PATIENCE)
    gc.freeze()  # what is there before any visit needs no looking through after each
    began = time.monotonic()
    line = measure_line()
    _say(line)
    done = ExchangeOutcome(line, [], {}, len(job.pairs) * job.rounds)
    for number in range(done.planned):
        pair = job.pairs[number % len(job.pairs)]
        if pair in done.left_out:
            continue
        left = job.seconds - largest(time.monotonic() - began, job.setting.device)
        if left <= 0 and number > 0:
            break
        _say(Doing(pair, number, done.planned))
        try:
            seen = visit(pair, job.setting, _SHARE * left / (done.planned - number))
        except Refused as e:
            if pair == BASELINE:
                raise
            done.left_out[pair] = str(e)
            continue
        done.visits.append(seen)
        _say(seen)
    return done


def _say(message: object) -> None:
    if dist.get_rank() == 0:
        tell(message)
