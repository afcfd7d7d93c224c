"""A shard in a process: it comes to where members meet, serves, and goes when all is over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from commlib.errors import CommlibError
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.registry import WINDOW, endpoint_kind
from commlib.server.job.job import ServerJob
from commlib.server.job.worker_groups import Topology
from commlib.server.membership import rendezvous
from commlib.server.membership.heartbeat import Membership
from commlib.server.membership.registry import LEFT, PLACED, SHARD, Epoch, Member, MembershipStore, place
from commlib.server.shard.chunk_state import ChunkState, make_cell
from commlib.server.shard.grouped_shard import GroupedShard
from commlib.server.shard.node import ShardNode
from commlib.server.shard.saver import Saver
from commlib.server.shard.shard import Shard
from commlib.server.storage.snapshot_policy import Snapshots

_log = logging.getLogger("commlib")
_LOOK_S = 0.05


class Stopped(Exception):
    """Whoever runs the shard has asked it to end."""


def serve(
    address: str,
    *,
    job: str = "default",
    endpoint: str = "zmq",
    wait: float | None = None,
    timeout: float = 60.0,
    snapshots: Snapshots | None = None,
    number: int | None = None,
    stop: threading.Event | None = None,
    ready: Callable[[str], None] = lambda name: None,
) -> str:
    """Serves as one shard until the job is over; returns why it is.

    Args:
        address: where members meet.
        job: which of the jobs there.
        endpoint: how they are reached, an entry point of ``commlib.endpoints``.
        wait: seconds that a job may take to begin; None: any time.
        timeout: seconds that anything else waits.
        snapshots: where the state is saved; None: nowhere.
        number: of a shard that knows its place among the others, from 0: they are in that order on the ring, and so
            beside those workers that they are to serve (:class:`commlib.Topology`). Default: as they come.
        stop: when it is set, the shard hands over what it has, as far as others are there to take it, and ends.
        ready: is told the shard's name once it can be seen.

    Raises:
        CommlibError: nobody keeps the meeting place; the job does not begin in time; it failed, and why.
    """
    stop = stop or threading.Event()
    warm()
    roll = MembershipStore(rendezvous.visit(address, job, timeout), timeout)
    towards = rendezvous.parse(address)[0]
    id = roll.new_id() if number is None else PLACED + number
    with endpoint_kind(endpoint)(id, job=roll.full_name(job), towards=towards, timeout=timeout, window=WINDOW) as mine:
        me = roll.enlist(SHARD, mine.address, getattr(mine, "public_key", None), place(), mine.rank)
        ready(me.name)
        try:
            begun = _await(lambda: _begun(roll), wait, stop)
        except Stopped:
            roll.beat(me.id, LEFT)
            return "it was stopped before the job began"
        return _serve_job(roll, mine, me, *begun, snapshots, stop, timeout)


def _serve_job(
    roll: MembershipStore,
    mine: Endpoint,
    me: Member,
    job: ServerJob,
    name: str,
    epoch: Epoch,
    snapshots: Snapshots | None,
    stop: threading.Event,
    timeout: float,
) -> str:
    saver = Saver(snapshots, job, me.name) if snapshots else None
    try:
        states = saver.begin(roll, fresh=me.id in epoch.members) if saver else None
    except CommlibError as e:
        roll.end(f"{me.name} cannot begin: {e}")
        raise
    chunks, coding = job.chunks, job.coding

    def cell(key: str) -> ChunkState:
        made = make_cell(job, chunks[key], epoch.view.workers)
        if states is not None:
            made.resume(states[key])
        return made

    keeper = saver.keeper if saver else None
    given: dict[str, Any] = {"started": states is not None, "keeper": keeper, "coding": coding, "lag": job.lag}
    if isinstance(job.rule, Topology) and job.rule.server_groups > 1:
        shard: Shard = GroupedShard(me.name, epoch.view, cell, topology=job.rule, **given)
    else:
        shard = Shard(me.name, epoch.view, cell, **given)
    node = ShardNode(mine, shard, {m.name: i for i, m in epoch.of(SHARD).items()}, timeout, job.urgency)
    over: list[str] = []
    member = Membership(
        roll,
        me,
        job,
        epoch,
        name=name,
        on_epoch=node.change,
        on_over=over.append,
        report=node.report,
        status=node.status,
    )
    node.connect(epoch)  # before it answers anybody
    node.start()
    member.start()
    try:
        node.call(lambda shard: coding.warm())  # workers do the same meanwhile
        while not over and node.error is None and not stop.wait(_LOOK_S):
            if saver is not None:
                saver.save(node)
        if not over and node.error is None:
            _leave(over, member, timeout)
    finally:
        member.stop()
        node.stop()
    if node.error is not None:
        raise node.error
    return over[0] if over else "it was stopped"


def warm() -> None:
    """torch imports a good deal with the first optimizer, for seconds in which a shard would seem dead."""
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
    parameter.grad = torch.zeros(1, dtype=torch.float32)
    torch.optim.SGD([parameter], lr=0.0).step()


def _begun(roll: MembershipStore) -> tuple[ServerJob, str, Epoch] | None:
    over = roll.over()
    if over is not None:
        raise CommlibError(f"the job ended before it began: {over}")
    name = roll.newest()
    return (ServerJob.unpack(roll.job(1.0)), name, roll.epoch(name)) if name else None


def _await(
    look: Callable[[], tuple[ServerJob, str, Epoch] | None], wait: float | None, stop: threading.Event
) -> tuple[ServerJob, str, Epoch]:
    end = None if wait is None else time.monotonic() + wait
    while True:
        try:
            found = look()
        except RuntimeError as e:
            if isinstance(e, CommlibError):
                raise
            raise CommlibError(f"the meeting place is gone ({e})") from e
        if found is not None:
            return found
        if stop.wait(_LOOK_S):
            raise Stopped
        if end is not None and time.monotonic() > end:
            raise CommlibError(f"the job has not begun for {wait:g} s: not all workers came")


def _leave(over: list[str], member: Membership, timeout: float) -> None:
    member.leave()
    end = time.monotonic() + timeout
    while not over and time.monotonic() < end:
        time.sleep(_LOOK_S)
    if not over:
        _log.warning("shutting down: no other shard took over this shard's chunks within %g s", timeout)
