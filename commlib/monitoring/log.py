"""``log_to(path)``: what a rank's exchanges have cost and lost, every so many steps.

Between two entries there is a count and a look at the plan, and the time that is waited is added up; all else is worked
out when an entry is due. On CUDA nothing is waited for but then. As with traces (:mod:`commlib.telemetry.recorder`):
nothing is done while nobody logs, and nothing here keeps alive what is logged.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from commlib.errors import ReplicasDiverged, check_numbers
from commlib.exchange.step_commit import StepCommit
from commlib.groups.world import World
from commlib.monitoring.error_norms import ErrorNorms, LayerNorms, total
from commlib.monitoring.log_writers import Entry, LogWriter, target_of
from commlib.monitoring.replica_check import DriftGuard
from commlib.planning.plan import Plan
from commlib.telemetry.recorder import Traceable
from commlib.telemetry.stats import PHASES, Meter, Stats

_log = logging.getLogger("commlib")
VERSION = 1
"""Of the entries: a reader knows it by the first of a run."""


class Loggable(Traceable, abc.ABC):
    """What :meth:`log_to` can be asked of: who exchanges gradients by a plan."""

    world: World
    _plan: Plan
    _steps: StepCommit
    _gauge: ErrorNorms
    _device: torch.device
    _logging: Log | None = None
    _guard: DriftGuard | None = None

    def log_to(self, *targets: Any, every: int = 10) -> Log:
        """Writes down every so many steps what this rank's exchanges have cost since the last time::

            comm.log_to("run.jsonl")  # rank 1: run.rank1.jsonl; `commlib top` shows them while the run goes on
            comm.log_to("run.jsonl", SummaryWriter("runs/1"), every=100)

        until ``stop()`` of what this returns, the end of a ``with`` block, :meth:`close`, or the end of the process.
        Begin and stop between two steps. Each rank that is to be seen calls it, and waits for nobody.

        A file is appended to, so a run that is resumed goes on in it. Logging never ends a training: a target that
        cannot be written any more is left, with one warning. What is in an entry: docs/watching.md.

        Args:
            *targets: paths that end in ``.jsonl``: an entry a line; rank 0's has this name, rank 1's is
                ``run.rank1.jsonl`` beside it, or put ``{rank}`` into the path. Other paths: folders for TensorBoard,
                where every rank is a run (``rank0``, …). Or a ``SummaryWriter``, which stays open.
            every: steps from an entry to the next, those that are skipped too.

        Raises:
            ValueError: it logs already; there is no target, or a file of another kind; ``every`` below 1.
            TypeError: what is no target.
            LogFailed: a target cannot be written. Nothing is logged then.
            MissingDependency: a folder, and TensorBoard is not installed.
        """
        if self._logging is not None:
            raise ValueError("it logs already: stop() what log_to returned before another one begins")
        check_numbers(1.0, every=every)
        if every < 1:
            raise ValueError(f"every must be a number of steps ≥ 1, got {every}")
        if not targets:
            raise ValueError("a log needs a target: a path that ends in .jsonl, a folder, or a SummaryWriter")
        self._logging = Log(self, _opened(targets, self.world.rank), every)
        return self._logging

    @abc.abstractmethod
    def stats(self) -> Stats:
        """Of all steps so far."""

    # -- what whoever exchanges tells -----------------------------------------------------------

    def _shows(
        self, module: nn.Module, group: Any, key: str, device: torch.device, gauge: ErrorNorms, check: int
    ) -> None:
        """What there is to be seen, and after how many exchanges replicas are to be compared; collective if not 0."""
        self._device, self._gauge = device, gauge
        if check:
            self._guard = DriftGuard(module, group, self.world, key, check, device)

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        waiting = super()._waiting()
        return waiting if self._logging is None else self._logging.waiting(waiting)

    def _waited_since(self, when: float) -> None:
        """The thread that trains has waited since then, of :func:`time.perf_counter`, not within :meth:`_waiting`."""
        if self._logging is not None:
            self._logging.exposed.add_wire(time.perf_counter() - when)

    def _exchanged_all(self, done: int, joined: bool) -> None:
        """Another step has come through, at the end of its backward pass; ``joined``: of others, after this rank's end.

        Raises:
            ReplicasDiverged, PeerLost: if replicas are compared.
        """
        if self._guard is not None:
            try:
                self._guard.exchanged(done, joined=joined, meanwhile=self._meanwhile)
            except ReplicasDiverged as e:
                if self._logging is not None:
                    self._logging.diverged(e)
                raise
        if self._logging is not None and not joined:
            self._logging.stepped(self)

    @abc.abstractmethod
    def _meanwhile(self) -> None:
        """Called now and then while something is waited for; raises if it will not come."""

    def _end_trace(self) -> None:
        """Ends a log, too."""
        super()._end_trace()
        if self._logging is not None:
            self._logging.stop()


class Log:
    """What is being logged: until its block ends, or :meth:`stop`."""

    def __init__(self, what: Loggable, targets: Sequence[LogWriter], every: int) -> None:
        self.exposed = Meter(what._device)
        self._what, self._every, self._process = weakref.ref(what), every, os.getpid()
        self._targets, self._rank = list(targets), what.world.rank
        self._seen, self._plan = what.stats(), what._plan
        self._steps, self._at, self._exposed_s = 0, time.perf_counter(), 0.0
        self._changes: list[dict[str, Any]] = []
        what._gauge.on = every == 1
        self._ended = weakref.finalize(what, self._close)
        self._write(
            "begin",
            self._seen.steps,
            commlib=VERSION,
            ranks=what.world.size,
            host=socket.gethostname(),
            pid=self._process,
            every=every,
            plan={p.spec.name: str(p.route) for p in self._plan},
        )

    @property
    def running(self) -> bool:
        """Whether it has not stopped."""
        return self._ended.alive

    def stop(self) -> None:
        """Ends it, with an entry of what came since the last one; again: nothing."""
        what = self._what()
        if what is not None and self.running:
            # after an error there may be a step under way that nobody will end: nothing is waited for here
            if self._steps and all(bucket.done() for bucket in what._steps.under_way()):
                self._entry(what, what.stats())
            what._logging, what._gauge.on = None, False
        self._ended()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    # -- steps ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self, inner: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """While the thread that trains waits; on CUDA, while its stream does."""
        with self.exposed.timed("wire"), inner:
            yield

    def stepped(self, what: Loggable) -> None:
        """Note another step, and write an entry if one is due."""
        self._steps += 1
        due, plan = self._steps >= self._every, what._plan
        if due or plan is not self._plan:
            stats = what.stats()
            self._changes += changes(self._plan, plan, stats.steps)
            self._plan = plan
            if due:
                self._entry(what, stats)
        what._gauge.on = self._steps + 1 >= self._every

    def diverged(self, error: ReplicasDiverged) -> None:
        """Log that replicas differ."""
        self._write("diverged", error.step, layer=error.layer, layers=error.layers, holders=error.holders)

    def _entry(self, what: Loggable, now: Stats) -> None:
        layers, at, exposed = what._gauge.read(now.steps), time.perf_counter(), self.exposed.seconds()["wire"]
        sent, dense = now.wire_bytes - self._seen.wire_bytes, now.dense_bytes - self._seen.dense_bytes
        self._write(
            "step",
            now.steps,
            steps=self._steps,
            skipped=now.skipped - self._seen.skipped,
            seconds=_short(at - self._at),
            bytes=sent,
            dense_bytes=dense,
            ratio=_short(dense / sent) if sent else None,
            exposed_ms=_short(1e3 * (exposed - self._exposed_s)),
            phases={phase: _short(now.seconds[phase] - self._seen.seconds[phase]) for phase in PHASES},
            error=_short(total(layers)),
            layers={name: _said(held) for name, held in layers.items()},
            changes=self._changes,
            checked=what._guard.checked if what._guard is not None else None,
        )
        self._steps, self._seen, self._at, self._exposed_s, self._changes = 0, now, at, exposed, []

    # -- targets --------------------------------------------------------------------------------

    def _write(self, kind: str, step: int | None, **more: Any) -> None:
        entry: Entry = {"kind": kind, "rank": self._rank, "time": round(time.time(), 3), "step": step, **more}
        for target in list(self._targets):
            try:
                target.write(entry)
            except Exception as e:  # whatever a disk or somebody's writer raises, training goes on
                self._targets.remove(target)
                what = "rank %d: %s cannot be written, and is not logged to any more: %s"
                _log.warning(what, self._rank, target.name, e)
                _closed(target)

    def _close(self) -> None:
        if os.getpid() != self._process:  # one that was forked meanwhile
            return
        self._write("end", self._seen.steps)
        for target in self._targets:
            _closed(target)


def changes(before: Plan, after: Plan, step: int) -> list[dict[str, Any]]:
    """Layers whose routes are others by now, in the plan's order. Pure.

    Args:
        before, after: two plans.
        step: how many came before the first one that goes by the new plan.
    """
    old = {p.spec.name: str(p.route) for p in before}
    return [
        {"step": step, "layer": p.spec.name, "from": old.get(p.spec.name), "to": str(p.route), "reason": p.reason}
        for p in after
        if old.get(p.spec.name) != str(p.route)
    ]


def _said(held: LayerNorms) -> dict[str, float | None]:
    owed = {"owed": _short(held.owed)} if held.owed else {}
    return {"error": _short(held.error), "residual": _short(held.residual), **owed}


def _short(value: float | None) -> float | None:
    """Six digits: there may be many layers."""
    return None if value is None else float(f"{value:.6g}")


def _opened(targets: Sequence[Any], rank: int) -> list[LogWriter]:
    found: list[LogWriter] = []
    try:
        for target in targets:
            found.append(target_of(target, rank))
    except BaseException:
        for target in found:
            target.close()
        raise
    return found


def _closed(target: LogWriter) -> None:
    with contextlib.suppress(Exception):  # what was to be said of it has been said
        target.close()
