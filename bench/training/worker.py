"""Body of one rank of ``commlib bench train``: measures the line, then takes part in every trial of the schedule.

A watchdog ends a rank that hangs, whatever it hangs in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import math
import os
import sys
import threading
from collections.abc import Iterator

import torch.distributed as dist

from commlib.bench.launch.child import tell
from commlib.bench.link.worker import measure_line
from commlib.messaging.throughput import Stream

from .schedule import Schedule, TrainingTrial
from .trial import WARM_UP, TrainingJob, device_of, run_visit
from .workloads import shapes

_GRACE_S = 2.0


@contextlib.contextmanager
def watched(name: str, limit_s: float, *, aloud: bool) -> Iterator[None]:
    """Ends this process if the block is not left within ``limit_s`` seconds.

    Such a hang cannot be undone from inside: threads of the backend wait for each other.

    Args:
        name: of the contender, for the message.
        aloud: say so on stderr; where a parent watches, it does.
    """

    def end() -> None:
        print(f"error: {name} hangs: its visit took more than {limit_s:.0f} s; leave it out", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    with open(os.devnull, "w") as nowhere:
        # A thread of its own outside the interpreter: it ends us even if somebody waits with the GIL held.
        faulthandler.dump_traceback_later(limit_s + (_GRACE_S if aloud else 0.0), exit=True, file=nowhere)
        if aloud:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()


_STARTING_S = 120.0
_MEETING = datetime.timedelta(minutes=20)  # ranks wait for each other between visits; the watchdog comes first
_FIRST_S, _SLACK = 60.0, 10.0  # the baseline's first visit: so much, and so many times what its bytes should take


@dataclasses.dataclass(frozen=True)
class Began:
    """Message of rank 0: a visit begins, and may take so long."""

    visit: TrainingTrial
    limit_s: float


def main(job: TrainingJob, schedule: Schedule, measure: bool, aloud: bool) -> tuple[Schedule, Stream | None]:
    """Run the schedule from where it stands; the same on every rank. The environment is torchrun's.

    Args:
        job: what to run.
        schedule: who is still to be visited; it is returned complete.
        measure: measure the line first.
        aloud: say on stderr what hangs, as no parent does.
    """
    with watched("the start of the ranks", _STARTING_S, aloud=aloud):
        device = device_of(job.backend)
        dist.init_process_group(job.backend, timeout=_MEETING)
        first = dist.get_rank() == 0
        line = measure_line() if measure else None
    if line is not None:
        limit = _first_limit_s(job, line)
        schedule = dataclasses.replace(schedule, first_limit_s=max(limit, schedule.first_limit_s))
        if first:
            tell(line)
    gc.freeze()  # what is there before any visit needs no looking through after each
    while (visit := schedule.next()) is not None:
        limit = schedule.limit_s(visit.name)
        if first:
            tell(Began(visit, limit))
        with watched(visit.name, limit, aloud=aloud):
            outcome = run_visit(visit, job, device, limit, schedule.steps_of(visit.name))
        schedule.record(outcome)
        if first:
            tell(outcome)
    return schedule, line


def _first_limit_s(job: TrainingJob, line: Stream) -> float:
    """A time in which the baseline is through with a visit, if the machine is not far slower than its line."""
    nbytes = 4 * sum(math.prod(shape) for _, shape in shapes(job.model))
    step_s = 2 * 8e-9 * nbytes / line.gbit_s + (job.backward_s or 0.0)
    return _FIRST_S + _SLACK * (WARM_UP + job.steps) * step_s
