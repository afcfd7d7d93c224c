"""A worker of a job: it comes to where members meet, and pushes and pulls from then on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from commlib.errors import CommlibError, PeerLost, PlanMismatch
from commlib.messaging.registry import WINDOW, endpoint_kind
from commlib.server.job.job import ServerJob
from commlib.server.membership import rendezvous
from commlib.server.membership.heartbeat import Membership
from commlib.server.membership.leader import MembersSeen, begin
from commlib.server.membership.registry import LEFT, SHARD, WORKER, Epoch, MembershipStore, ShardReport, place
from commlib.server.worker.client import ClientNode
from commlib.server.worker.client_state import ClientState

_log = logging.getLogger("commlib")
_LOOK_S = 0.02


@dataclasses.dataclass(frozen=True)
class WorkerTerms:
    """How a worker comes.

    Args:
        address: where members meet.
        name: of the job there.
        rank: of one that is there from the start; None: a latecomer.
        endpoint: how members are reached, an entry point of ``commlib.endpoints``.
        timeout: seconds that anything waits.
        check: raises if it makes no sense any more to wait for the job to begin.
        wait: seconds to wait for values, and so for the other workers; None: the time-out.
    """

    address: str
    name: str = "default"
    rank: int | None = None
    endpoint: str = "zmq"
    timeout: float = 300.0
    check: Callable[[], None] | None = None
    wait: float | None = None


class WorkerSession:
    """Session of a worker that has come; :meth:`close` when it goes.

    Args:
        job: what it wants to train, and how.
        terms: how it comes.

    Raises:
        PlanMismatch: the others train something else; what differs.
        PeerLost: not all came in time that are to begin.
        CommlibError: there is no meeting place, or the job is over.
    """

    def __init__(self, job: ServerJob, terms: WorkerTerms) -> None:
        self.job, self._terms = job, terms
        self._over: list[str] = []
        self._came = threading.Event()
        self._client: ClientNode | None = None
        self._member: Membership | None = None
        self._roll = MembershipStore(rendezvous.visit(terms.address, terms.name, terms.timeout), terms.timeout)
        self._agree()
        job.coding.warm()
        id = terms.rank if terms.rank is not None else self._roll.new_id()
        towards = rendezvous.parse(terms.address)[0]
        try:
            opened = endpoint_kind(terms.endpoint)(
                id,
                job=self._roll.full_name(terms.name),
                towards=towards,
                timeout=terms.timeout,
                window=WINDOW,
            )
        except (CommlibError, ValueError) as e:
            self._decline(e)
            raise
        self._endpoint = opened
        try:
            key = getattr(self._endpoint, "public_key", None)
            self._me = self._roll.enlist(WORKER, self._endpoint.address, key, place(), id)
            self._join()
        except BaseException as e:
            self._give_up(str(e))
            raise

    @property
    def id(self) -> int:
        """Number of this worker, which no other has."""
        return self._me.id

    @property
    def first(self) -> bool:
        """Whether it says what values begin with."""
        return self._terms.rank == 0

    @property
    def begun_at(self) -> int:
        """Steps that the job had done before, if it goes on from snapshots."""
        return self._roll.begun()[0]

    @property
    def client(self) -> ClientNode:
        """Client by which this worker pushes and pulls; only until it has left."""
        assert self._client is not None
        return self._client

    @property
    def closed(self) -> bool:
        """Whether this worker has left."""
        return self._client is None

    def close(self, *, flush: bool = True) -> None:
        """Leave the job: the others no longer wait for this worker. A second call does nothing.

        Args:
            flush: wait until all that it pushed is acknowledged.

        Raises:
            CommlibError: what it pushed is not acknowledged; why.
        """
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if flush:
                client.flush()
        finally:
            if self._member is not None:
                self._member.stop()
            client.stop()
            self._endpoint.close()

    def await_end(self, timeout: float) -> bool:
        """Whether all have gone within so many seconds: whoever keeps the meeting place goes last."""
        end = time.monotonic() + timeout
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end:
                if self._roll.over() is not None:
                    return True
                time.sleep(_LOOK_S)
        return False

    # -- coming ---------------------------------------------------------------------------------

    def _agree(self) -> None:
        agreed = ServerJob.unpack(self._roll.publish(self.job.pack()))
        try:
            self.job.check(agreed, "who came first")
        except PlanMismatch as e:
            self._decline(e)
            raise

    def _decline(self, why: Exception) -> None:
        """Tell the others not to wait for this worker, if it is of those that begin."""
        if not self._roll.newest() and self._terms.rank is not None:
            self._roll.end(f"worker {self._terms.rank} cannot take part: {why}")

    def _join(self) -> None:
        name = self._await_first()
        epoch = self._roll.epoch(name)
        self._member = Membership(
            self._roll,
            self._me,
            self.job,
            epoch,
            name=name,
            on_epoch=self._on_epoch,
            on_over=self._on_over,
            report=_nothing,
            status=self._status,
        )
        self._on_epoch(epoch)
        self._member.start()
        if not self._came.wait(self._terms.timeout):
            raise PeerLost(f"no shard took {self._me.name} in for {self._terms.timeout:g} s")
        if self._client is None:
            raise CommlibError(f"the job is over: {self._over[0]}")
        if self._terms.rank is not None and self._me.id not in epoch.view.workers:
            raise CommlibError(f"the job has begun without worker {self._me.id}: come late, without a rank")

    def _await_first(self) -> str:
        """The newest view's name, once there is one; the first worker makes the first."""
        end, places = time.monotonic() + self._terms.timeout, dict[int, Any]()
        while True:
            name = self._roll.newest()
            if name:
                return name
            over = self._roll.over()
            if over is not None:
                raise CommlibError(f"the job is over: {over}")
            members = {m.id: m for m in self._roll.members(places).values()}
            seen = MembersSeen(members, self._roll.beats(members), {})
            epoch = begin(self.job, seen) if self.first else None
            if epoch is not None:
                self._roll.propose("", epoch, self._me.id)
            if self._terms.check is not None:
                self._terms.check()
            if time.monotonic() > end:
                raise PeerLost(_who_came(self.job, seen, self._terms.timeout))
            time.sleep(_LOOK_S)

    # -- what the membership tells, in its thread ------------------------------------------------

    def _on_epoch(self, epoch: Epoch) -> None:
        if self._me.id not in epoch.view.workers:
            return
        if self._client is None and not self._came.is_set():
            ranks = {m.name: i for i, m in epoch.of(SHARD).items()}
            client = ClientNode(
                self._endpoint,
                ClientState(self._me.id, epoch.view, self.job.coding),
                ranks,
                self._terms.timeout if self._terms.wait is None else self._terms.wait,
                self.job.urgency,
            )
            client.change(epoch)
            client.start()
            self._client = client
            self._came.set()
        elif self._client is not None:
            self._client.change(epoch)

    def _on_over(self, why: str) -> None:
        self._over.append(why)
        if self._client is not None:
            self._client.fail(PeerLost(f"the job is over: {why}"))
        self._came.set()

    def _status(self) -> dict[str, Any]:
        client = self._client
        return client.status() if client is not None else {}

    def _give_up(self, why: str) -> None:
        with contextlib.suppress(RuntimeError):
            if self._member is not None:
                self._member.stop()
            else:
                self._roll.beat(self._endpoint.rank, LEFT)
        if self._client is not None:
            self._client.stop()
        self._endpoint.abort(why)


def _nothing(number: int) -> ShardReport | None:
    return None  # a worker has no keys


def _who_came(job: ServerJob, seen: MembersSeen, seconds: float) -> str:
    shards, workers = seen.living(SHARD, frozenset()), seen.living(WORKER, frozenset())
    lacking = sorted(set(range(job.workers)) - workers.keys())
    return (
        f"the job has not begun for {seconds:g} s: {len(shards)} of {job.shards} shards came, and {len(workers)} of "
        f"{job.workers} workers" + (f"; not {', '.join(map(str, lacking))}" if lacking else "")
    )
