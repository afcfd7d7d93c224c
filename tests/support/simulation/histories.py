"""Histories: a job and its faults, drawn from a seed, and what holds after each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import random
import re

from commlib.errors import CommlibError
from tests.support.simulation.installed import simulated
from tests.support.simulation.job import Job
from tests.support.simulation.jobs import JOBS, OwnError
from tests.support.simulation.network import Network
from tests.support.simulation.world import Process, Violation, World

GRACE_S = 4.0
"""Seconds after the deadline until which a rank has raised its error, three, and left its groups."""


@dataclasses.dataclass
class History:
    """One history, before and after it ran.

    Args:
        seed: from which all of it follows.
        job: what the ranks do.
        outcomes: of each rank, once it ran: its error, "right", "lost".
    """

    seed: int
    job: Job
    outcomes: list[str] = dataclasses.field(default_factory=list)
    switches: int = 0
    seconds: float = 0.0
    lines: list[str] = dataclasses.field(default_factory=list)


@functools.cache
def _warm(kind: str) -> None:
    """Run one history of this kind first: what a process does once only would make its first another one later."""
    with contextlib.suppress(Violation):
        _run(0, kind, faults=False)


def run(seed: int, kind: str | None = None, *, faults: bool = True) -> History:
    """Run the history of a seed.

    Args:
        seed: of it.
        kind: of its job; by default the seed says.
        faults: whether there are any.

    Raises:
        Violation: something went wrong in it; the message has the whole history.
    """
    kind = kind or random.Random(f"kind {seed}").choices(list(JOBS), (10, 9, 1, 1))[0]
    _warm(kind)
    return _run(seed, kind, faults=faults)


def _run(seed: int, kind: str, *, faults: bool) -> History:
    draw = random.Random(seed)
    world = World(draw.getrandbits(32), restless=draw.choice((0.0, 0.1, 0.4)), late=draw.choice((0.0, 0.05, 0.3)))
    network = Network(world, delay_s=draw.choice((1e-5, 1e-4, 5e-3)), rate=draw.choice((1e6, 1.25e8)))
    job = JOBS[kind](world, network, draw)
    history = History(seed, job)
    with simulated(job):
        try:
            ranks = job.start()
            if faults:
                job.disturb(ranks)
            began = world.now
            world.run(job.longest_s)
            history.seconds, history.switches, history.lines = world.now - began, world.switches, world.lines
            _judge(history, world, ranks)
        except (Violation, AssertionError) as e:
            stuck = "".join(f"\n    {task}: {at}" for task, at in world.waiting().items())
            lines = "\n".join(world.lines[-100:])
            again = f'make simulate ARGS="--seed {seed} --job {kind} --histories 1 --show"'
            raise Violation(f"{e}\n{again}: {job}\n{lines}{stuck and chr(10) + 'still there:' + stuck}") from e
        finally:
            world.close()
            job.at_end.close()
            gc.collect()
            gc.freeze()  # what is left, modules most of all, need not be looked through after the next one
    return history


def _judge(history: History, world: World, ranks: list[Process]) -> None:
    """What holds of every history, whatever its job."""
    job = history.job
    results, quiet = [], max((end for _, end, _ in job.faults), default=0.0)
    lost = [r for r, p in enumerate(ranks) if p.killed or (p.stopped and not p.over)]
    for rank, process in enumerate(ranks):
        if rank in lost:
            history.outcomes.append("lost")
        elif not process.over:
            raise Violation(f"{process.name} has neither come through nor raised")
        elif process.error is not None:
            said = f"{process.name} raised {type(process.error).__name__}: {process.error}"
            if isinstance(process.error, OwnError):
                history.outcomes.append("raised its own")
                continue
            if not isinstance(process.error, CommlibError):
                raise Violation(said) from process.error
            took = process.ended_at - max(quiet, job.came.get(rank, 0.0))
            if took > job.deadline_s + GRACE_S:
                raise Violation(f"{took:.1f} s after it could have known, {said}")
            gone = lost + job.left
            if gone and rank not in job.left and not job.cuts and not _names(said, gone, keeper_left=ranks[0].over):
                raise Violation(f"it names none of {gone}: {said}")
            history.outcomes.append(f"{type(process.error).__name__}: {process.error}")
        else:
            history.outcomes.append("right")
            results.append(process.result)
            job.results[rank] = process.result
    if not job.faults and not job.may_fail and len(results) < len(ranks):
        raise Violation(f"nothing went wrong, and ranks raised: {history.outcomes}")
    if results or not ranks:
        job.check(results)


def _names(said: str, lost: list[int], *, keeper_left: bool) -> bool:
    """Whether words name one of these ranks, or say that the store is gone, as it is with rank 0."""
    found = {
        int(n) for words in re.findall(r"ranks? (\d+(?:(?:, | and )\d+)*)", said) for n in re.findall(r"\d+", words)
    }
    return bool(found & set(lost)) or ("store" in said and (keeper_left or 0 in lost))
