"""``log_to(path)``: what a rank's exchanges have cost and lost, every so many steps.

Between two entries there is a count and a look at the plan, and the time that is waited is added up; all else is worked
out when an entry is due. On CUDA nothing is waited for but then. As with traces (:mod:`commlib.telemetry.recorder`):
nothing is done while nobody logs, and nothing here keeps alive what is logged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch

from commlib.errors import ReplicasDiverged, check_numbers
from commlib.exchange.step_commit import StepCommit
from commlib.groups.world import World
from commlib.monitoring.error_norms import ErrorNorms, LayerNorms, total
from commlib.monitoring.log_writers import Entry, LogWriter, target_of
from commlib.monitoring.replica_check import DriftGuard
from commlib.planning.plan import Plan
from commlib.telemetry.recorder import Tracer
from commlib.telemetry.stats import PHASES, Meter, Stats

_log = logging.getLogger("commlib")
VERSION = 1
"""Of the entries: a reader knows it by the first of a run."""


class Logged(Protocol):
    """Exchange of gradients by a plan, as a log sees it: a part of :class:`commlib.HookState`."""

    world: World

    @property
    def _plan(self) -> Plan:
        """Plan as decided, without what was measured since."""

    _steps: StepCommit

    def stats(self) -> Stats:
        """Totals of all steps so far."""


class Monitor:
    """Log and comparison of replicas of one attached model; a step tells it when it waits, and when it is through.

    Args:
        what: the attached model, which is not kept alive.
        tracer: of the same model.
        device: of its gradients.
        gauge: what measures compression errors.
        guard: what compares replicas; None: nobody asked for it.

    Attributes:
        log: what is being logged; None: nothing.
    """

    def __init__(
        self, what: Logged, tracer: Tracer, device: torch.device, gauge: ErrorNorms, guard: DriftGuard | None = None
    ) -> None:
        self._what, self._tracer, self.device = weakref.ref(what), tracer, device
        self.gauge, self.guard = gauge, guard
        self.log: Log | None = None

    def start(self, targets: Sequence[Any], every: int) -> Log:
        """Begin a log; for the user's ``log_to(*targets, every=…)``.

        Raises:
            ValueError, TypeError, LogFailed, MissingDependency: as :meth:`commlib.HookState.log_to` says.
        """
        if self.log is not None:
            raise ValueError("a log is running already: stop() what log_to returned before another one begins")
        check_numbers(1.0, every=every)
        if every < 1:
            raise ValueError(f"every must be a number of steps ≥ 1, got {every}")
        if not targets:
            raise ValueError("a log needs a target: a path that ends in .jsonl, a folder, or a SummaryWriter")
        what = self._what()
        assert what is not None  # it is what calls this
        self.log = Log(what, self, _opened(targets, what.world.rank), every)
        return self.log

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Note, in a trace and in a log, that the thread that trains waits for what is exchanged."""
        waiting = self._tracer.waiting()
        return waiting if self.log is None else self.log.waiting(waiting)

    def waited_since(self, when: float) -> None:
        """Note a wait of the thread that trains, from ``when`` of :func:`time.perf_counter`, not in :meth:`waiting`."""
        if self.log is not None:
            self.log.exposed.add_wire(time.perf_counter() - when)

    def exchanged(self, done: int, *, joined: bool, meanwhile: Callable[[], None]) -> None:
        """Note another step that has come through, at the end of its backward pass.

        Args:
            done: how many there were.
            joined: of others, after this rank's end (``ddp.join()``).
            meanwhile: called now and then while something is waited for; raises if it will not come.

        Raises:
            ReplicasDiverged, PeerLost: if replicas are compared.
        """
        if self.guard is not None:
            try:
                self.guard.exchanged(done, joined=joined, meanwhile=meanwhile)
            except ReplicasDiverged as e:
                if self.log is not None:
                    self.log.diverged(e)
                raise
        what = self._what()
        if self.log is not None and not joined and what is not None:
            self.log.stepped(what)

    def end(self) -> None:
        """End a trace and a log."""
        self._tracer.end()
        if self.log is not None:
            self.log.stop()


class Log:
    """Log that is being written: until its block ends, or :meth:`stop`."""

    def __init__(self, what: Logged, monitor: Monitor, targets: Sequence[LogWriter], every: int) -> None:
        self.exposed = Meter(monitor.device)
        self._what, self._monitor, self._every, self._process = weakref.ref(what), monitor, every, os.getpid()
        self._targets, self._rank = list(targets), what.world.rank
        self._seen, self._plan = what.stats(), what._plan
        self._steps, self._at, self._exposed_s = 0, time.perf_counter(), 0.0
        self._changes: list[dict[str, Any]] = []
        monitor.gauge.on = every == 1
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
            self._monitor.log, self._monitor.gauge.on = None, False
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

    def stepped(self, what: Logged) -> None:
        """Note another step, and write an entry if one is due."""
        self._steps += 1
        due, plan = self._steps >= self._every, what._plan
        if due or plan is not self._plan:
            stats = what.stats()
            self._changes += changes(self._plan, plan, stats.steps)
            self._plan = plan
            if due:
                self._entry(what, stats)
        self._monitor.gauge.on = self._steps + 1 >= self._every

    def diverged(self, error: ReplicasDiverged) -> None:
        """Log that replicas differ."""
        self._write("diverged", error.step, layer=error.layer, layers=error.layers, holders=error.holders)

    def _entry(self, what: Logged, now: Stats) -> None:
        layers, at, exposed = self._monitor.gauge.read(now.steps), time.perf_counter(), self.exposed.seconds()["wire"]
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
            checked=self._monitor.guard.checked if self._monitor.guard is not None else None,
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
