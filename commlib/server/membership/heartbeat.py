"""A member's part in the membership, in a thread of its own: it says that it lives, and learns of new views.

A shard also judges the others, and one of them at a time makes the views (:mod:`commlib.server.membership.leader`).

Ordering: everything that follows from an epoch is done by ``on_epoch`` in this thread before the next one is looked
for, so epochs come in order; one that was passed over is never seen, for nobody acts in it once there is a newer one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from commlib.errors import CommlibError
from commlib.server.job.job import ServerJob
from commlib.server.membership.failure_detector import FailureDetector
from commlib.server.membership.leader import JobOver, MembersSeen, WantReports, decide
from commlib.server.membership.registry import LEAVING, LEFT, SHARD, Epoch, Member, MembershipStore, ShardReport

_log = logging.getLogger("commlib")
_LOOKS = 16  # in the time that a member may be silent
_SLOWEST_S = 0.25
_TOLD_EVERY = 4  # looks
_MISSED = 4  # intervals without a look, and whoever should have looked was away


class Membership:
    """Membership of one process, from :meth:`start` to :meth:`stop`.

    Args:
        roll: its own: no other thread uses it meanwhile.
        me: this member.
        job: what all agree on.
        epoch: the newest that it knows.
        name: that epoch's.
        on_epoch: is told of each newer one.
        on_over: is told why everything has ended, or is not to be had any more; once, and nothing comes after it.
        report: what this shard has, if it has the view of so many; None of a worker, or if it has not.
        status: how it is doing, for people.
    """

    def __init__(
        self,
        roll: MembershipStore,
        me: Member,
        job: ServerJob,
        epoch: Epoch,
        *,
        name: str,
        on_epoch: Callable[[Epoch], None],
        on_over: Callable[[str], None],
        report: Callable[[int], ShardReport | None],
        status: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._roll, self._me, self._job = roll, me, job
        self._epoch, self._name = epoch, name
        self._on_epoch, self._on_over, self._report, self._status = on_epoch, on_over, report, status
        self._nbytes = {key: chunk.nbytes for key, chunk in job.chunks.items()}
        self._interval = min(_SLOWEST_S, job.patience / _LOOKS)
        self._places: dict[int, Member] = {}
        self._pulses: dict[int, FailureDetector] = {}
        self._reported: tuple[int, ShardReport] | None = None
        self._settled: object = None  # what was known when nothing was to be done
        self._lost_since: float | None = None  # a key seems to be kept by nobody
        self._beats, self._looked = 0, time.monotonic()
        self._leaving = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"commlib-member-{me.id}", daemon=True)

    def start(self) -> None:
        """Start the thread that sends heartbeats and hears the others'."""
        self._thread.start()

    def leave(self) -> None:
        """A shard hands over what it has, and is in no epoch then."""
        self._leaving = True

    def stop(self, timeout: float = 5.0) -> None:
        """Says that it has left, and ends; again: nothing."""
        self._ended.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        why = None
        try:
            while not self._ended.wait(self._interval):
                why = self._look()
                if why is not None:
                    break
            else:
                self._roll.beat(self._me.id, LEFT)
        except RuntimeError as e:  # CommlibError, and what the store raises when it is gone
            why = str(e) if isinstance(e, CommlibError) else f"the meeting place is gone ({e})"
        except Exception as e:  # a mistake of ours: nobody may wait for a thread that is not there
            _log.exception("%s cannot go on", self._me.name)
            why = f"{type(e).__name__}: {e}"
        if why is not None and not self._ended.is_set():
            self._on_over(why)

    def _look(self) -> str | None:
        """Once; returns why it is over, if it is."""
        self._beats += 1
        self._roll.beat(self._me.id, f"{LEAVING} {self._beats}" if self._leaving else str(self._beats))
        over = self._roll.over()
        if over is not None:
            return over
        if self._beats % _TOLD_EVERY == 1:
            self._roll.tell(self._me.id, {"view": self._epoch.view.number, **self._status()})
        name = self._roll.newest()
        if name != self._name:
            self._name, self._epoch = name, self._roll.epoch(name)
            self._reported = None
            if self._epoch.news:
                _log.info("view %d: %s", self._epoch.view.number, self._epoch.news)
            if self._me.id in self._epoch.gone:
                return self._excluded()
            self._on_epoch(self._epoch)
        return self._judge() if self._me.kind == SHARD else self._watch()

    def _excluded(self) -> str:
        return f"{self._me.name} was given up in view {self._epoch.view.number}: {self._epoch.news}"

    def _watch(self) -> str | None:
        """As a worker: whether any shard lives."""
        shards = self._epoch.of(SHARD)
        silent = self._silent(shards, self._roll.beats(shards))
        if len(silent) < len(shards):
            return None
        told = ", ".join(f"{m.name} ({m.where}, silent for {silent[i]:.1f} s)" for i, m in shards.items())
        return f"all shards are lost: {told}"

    def _judge(self) -> str | None:
        """As a shard: what others want, and what is to follow."""
        number = self._epoch.view.number + 1
        if self._roll.wanted() == number:
            report = self._report(number - 1)
            if report is not None and self._reported != (number, report):
                self._roll.report(number, self._me.id, report)
                self._reported = number, report
        members = {m.id: m for m in self._roll.members(self._places).values() if m.id not in self._epoch.gone}
        words = self._roll.beats(members)
        seen = MembersSeen(members, words, self._silent(members, words))
        if self._me.id != min(seen.living(SHARD, self._epoch.gone).keys() & self._epoch.members.keys(), default=None):
            self._lost_since = None  # what it knew as the leader is old when it is that again
            return None
        reports = self._roll.reports(number, self._epoch.of(SHARD)) if self._roll.wanted() == number else {}
        said = {i: word for i, word in words.items() if word == LEFT or seen.leaving(i)}
        known = (self._name, members.keys(), said.keys(), seen.silent.keys(), reports)
        if known == self._settled:
            return None
        next_ = decide(self._job, self._nbytes, self._epoch, seen, reports)
        self._settled = known if next_ is None else None
        lost = isinstance(next_, JobOver) and not next_.surely
        if not lost:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = time.monotonic()
        if isinstance(next_, WantReports):
            self._roll.want(number)
        elif isinstance(next_, JobOver):
            if self._lost_since is None or time.monotonic() - self._lost_since > self._job.patience:
                self._roll.end(next_.why)
        elif next_ is not None:
            self._roll.propose(self._name, next_, self._me.id)
        return None

    def _silent(self, ids: Iterable[int], words: dict[int, str]) -> dict[int, float]:
        """Members that have been silent for too long → seconds."""
        now = time.monotonic()
        away, self._looked = max(0.0, now - self._looked - _MISSED * self._interval), now
        silent = {}
        for i in ids:
            pulse = self._pulses.setdefault(i, FailureDetector(now, self._job.patience))
            pulse.excuse(min(away, pulse.silent(now)))
            pulse.hear(now, words[i])
            if pulse.late(now) and i != self._me.id:
                silent[i] = pulse.silent(now)
        return silent
