"""Registry of members and views, kept in a store of torch.distributed that all members see.

::

    job                      what all agree on
    members, member/<i>      how many came so far; who the i-th is
    beat/<id>                what a member last said, another word each time: a number; "leaving" and a number, of a
                             shard that hands over first what it has; "left", its last
    status/<id>              how a member is doing, for people
    view                     <number>:<who made it>, changed by compare-and-set only; view/<that> is it
    wanted, report/<n>/<id>  that view n is to be made; what a shard has, for who makes it
    begun                    steps that were done before, of a job that goes on from snapshots
    over                     why everything has ended

Ordering: a view is written before it becomes the newest, and there is one newest: of two that are made at the same
time, one is dropped. Whoever reads a word of the store reads what somebody wrote whole.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgpack

from commlib.errors import PeerLost
from commlib.groups.store import DeadlineStore
from commlib.server.membership.view import View

WORKER, SHARD = "worker", "shard"
LEFT, LEAVING = "left", "leaving"
_LOOK_S = 0.02
PLACED = 1 << 15
"""Ids of shards that know their place; names are in the order of ids, which have as many digits all."""
_LATER = 1 << 16  # ids of those that were not there when the job began


@dataclasses.dataclass(frozen=True)
class Member:
    """Entry of a member that has come.

    Args:
        id: its endpoint's rank, and a worker's number: nobody else's, not even when it comes back.
        kind: ``worker`` or ``shard``.
        address: its endpoint's.
        key: its public key, if it has one.
        where: host and process, for people.
    """

    id: int
    kind: str
    address: str
    key: str | None
    where: str

    @property
    def name(self) -> str:
        """As the ring and people know it."""
        return f"{self.kind}-{self.id}"


@dataclasses.dataclass(frozen=True)
class Epoch:
    """A view, and who is in it.

    Args:
        view: this.
        members: by id; those that are leaving are among them.
        gone: ids that were in one, and never will be again.
        news: what changed, for people.
    """

    view: View
    members: Mapping[int, Member]
    gone: frozenset[int] = frozenset()
    news: str = ""

    def of(self, kind: str) -> dict[int, Member]:
        """Members of a kind in this epoch, by id."""
        return {i: m for i, m in self.members.items() if m.kind == kind}


@dataclasses.dataclass(frozen=True)
class ShardReport:
    """Report of a shard before a new view: the keys that it could own, and the highest clock that it knows."""

    whole: frozenset[str]
    clock: int


class MembershipStore:
    """Access of one member to the registry; for one thread at a time.

    Args:
        store: of torch.distributed; all members have the same.
        timeout: seconds to wait for what must be there.
    """

    def __init__(self, store: DeadlineStore, timeout: float = 60.0) -> None:
        self._store, self._timeout = store, timeout

    # -- the job --------------------------------------------------------------------------------

    def publish(self, job: bytes) -> bytes:
        """Says what is agreed on, if nobody has; returns what was said first."""
        return bytes(self._store.compare_set("job", "", job))

    def job(self, timeout: float) -> bytes:
        """Job that was agreed on, packed.

        Raises:
            PeerLost: nobody has said it in time.
        """
        return self._wait("job", timeout, "no worker has said what is to be trained")

    def full_name(self, job: str) -> str:
        """Name of a job with a secret in it, which its first member draws: endpoints of another are strangers."""
        return f"{job} {bytes(self._store.compare_set('secret', '', secrets.token_hex(16))).decode()}"

    # -- members --------------------------------------------------------------------------------

    def enlist(self, kind: str, address: str, key: str | None, where: str, id: int | None = None) -> Member:
        """Enter a member into the registry.

        Args:
            kind: ``worker`` or ``shard``.
            address, key: of its endpoint.
            where: for people.
            id: of one that is there from the start; else a new one (:meth:`new_id`).
        """
        member = Member(self.new_id() if id is None else id, kind, address, key, where)
        self.beat(member.id, "0")
        place = self._store.add("members", 1) - 1
        self._store.set(f"member/{place}", msgpack.packb(dataclasses.astuple(member)))
        return member

    def new_id(self) -> int:
        """Draw an id that no other member has."""
        return int(_LATER + self._store.add("ids", 1))

    def members(self, known: dict[int, Member]) -> dict[int, Member]:
        """Place → who came there; those that are not ``known`` are read."""
        count = int(self._store.add("members", 0))
        unread = [i for i in range(count) if i not in known and self._store.check([f"member/{i}"])]
        for i in unread:
            known[i] = Member(*msgpack.unpackb(self._store.get(f"member/{i}")))
        return known

    def beat(self, id: int, word: str) -> None:
        """A member is alive; another word than before says so."""
        self._store.set(f"beat/{id}", word)

    def beats(self, ids: Iterable[int]) -> dict[int, str]:
        """Last heartbeats of members: id → word."""
        asked = list(ids)
        words = self._store.multi_get([f"beat/{i}" for i in asked]) if asked else []
        return {i: word.decode() for i, word in zip(asked, words, strict=True)}

    def tell(self, id: int, status: Mapping[str, Any]) -> None:
        """How this member is doing, for people: plain values."""
        self._store.set(f"status/{id}", msgpack.packb(dict(status)))

    def told(self, ids: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Last statuses of members: id → figures."""
        found = [i for i in ids if self._store.check([f"status/{i}"])]
        return {i: msgpack.unpackb(self._store.get(f"status/{i}"), strict_map_key=False) for i in found}

    # -- views ----------------------------------------------------------------------------------

    def newest(self) -> str:
        """The name of the newest epoch; empty before the first."""
        found: bytes = self._store.compare_set("view", "-", "-")  # reads: nothing is ever "-"
        return "" if found == b"-" else found.decode()

    def epoch(self, name: str) -> Epoch:
        """Read an epoch by its name."""
        number, places, workers, members, gone, news = msgpack.unpackb(
            self._wait(f"view/{name}", self._timeout, f"view {name} is not in the store"), strict_map_key=False
        )
        view = View(number, {key: tuple(at) for key, at in places.items()}, workers)
        return Epoch(view, {m[0]: Member(*m) for m in members}, frozenset(gone), news)

    def propose(self, old: str, epoch: Epoch, by: int) -> bool:
        """Makes an epoch the newest, after the one of this name; false if another has come in between."""
        view, name = epoch.view, f"{epoch.view.number}:{by}"
        content = [view.number, view.places, view.workers, list(map(dataclasses.astuple, epoch.members.values()))]
        self._store.set(f"view/{name}", msgpack.packb([*content, sorted(epoch.gone), epoch.news]))
        return bytes(self._store.compare_set("view", old, name)).decode() == name

    def want(self, number: int) -> None:
        """All shards are to report, for this view."""
        self._store.set("wanted", str(number))

    def wanted(self) -> int:
        """The view for which shards are to report; 0: none."""
        return int(self._store.get("wanted")) if self._store.check(["wanted"]) else 0

    def report(self, number: int, id: int, report: ShardReport) -> None:
        """Publish this shard's report for a view that is to be made."""
        self._store.set(f"report/{number}/{id}", msgpack.packb([sorted(report.whole), report.clock]))

    def reports(self, number: int, ids: Iterable[int]) -> dict[int, ShardReport]:
        """Reports of these shards that have come."""
        found = {}
        for i in ids:
            if self._store.check([f"report/{number}/{i}"]):
                whole, clock = msgpack.unpackb(self._store.get(f"report/{number}/{i}"))
                found[i] = ShardReport(frozenset(whole), clock)
        return found

    def begin_at(self, step: int, run: str) -> tuple[int, str]:
        """Says how many steps the job has done before, and a name for all that it does now; returns what was said
        first."""
        self._store.compare_set("begun", "", f"{step} {run}")
        return self.begun()

    def begun(self) -> tuple[int, str]:
        """How many steps the job had done before it began anew, and the name of what it has done since."""
        said = self._store.get("begun").decode() if self._store.check(["begun"]) else "0 "
        step, _, run = said.partition(" ")
        return int(step), run

    # -- the end --------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Everything has ended; who says so first says why."""
        self._store.compare_set("over", "", why)

    def over(self) -> str | None:
        """Why everything has ended, if it has."""
        return self._store.get("over").decode() if self._store.check(["over"]) else None

    def _wait(self, key: str, timeout: float, else_: str) -> bytes:
        end = time.monotonic() + timeout
        while not self._store.check([key]):  # not its wait(): that complains on stderr of what is no fault
            if time.monotonic() > end:
                raise PeerLost(f"{else_}, for {timeout:g} s")
            time.sleep(_LOOK_S)
        return bytes(self._store.get(key))


def place() -> str:
    """Host and process, for people."""
    return f"{socket.gethostname()} pid {os.getpid()}"
