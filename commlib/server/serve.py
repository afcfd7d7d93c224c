"""A shard in a process: it comes to where members meet, serves, and goes when all is over."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

import torch

from commlib.doors import door
from commlib.errors import CommlibError
from commlib.server import meeting
from commlib.server.job import Job
from commlib.server.member import Membership
from commlib.server.roll import SHARD, Epoch, Roll
from commlib.server.shard import Shard
from commlib.server.shard_node import ShardNode

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
        stop: when it is set, the shard hands over what it has, as far as others are there to take it, and ends.
        ready: is told the shard's name once it can be seen.

    Raises:
        CommlibError: nobody keeps the meeting place; the job does not begin in time; it failed, and why.
    """
    stop = stop or threading.Event()
    warm()
    roll = Roll(meeting.visit(address, job, timeout), timeout)
    with door(endpoint)(roll.new_id(), job=job, towards=meeting.parse(address)[0], timeout=timeout) as mine:
        me = roll.enlist(SHARD, mine.address, getattr(mine, "public_key", None), place(), mine.rank)
        ready(me.name)
        try:
            begun = _await(lambda: _begun(roll), wait, stop)
        except Stopped:
            roll.beat(me.id, "left")
            return "it was stopped before the job began"
        task, name, epoch = begun
        chunks = task.chunks
        shard = Shard(me.name, epoch.view, lambda key: task.cell(chunks[key], epoch.view.workers), started=False)
        node = ShardNode(mine, shard, {m.name: i for i, m in epoch.of(SHARD).items()}, timeout)
        over: list[str] = []
        member = Membership(
            roll,
            me,
            task,
            epoch,
            name=name,
            on_epoch=node.change,
            on_over=over.append,
            report=node.report,
        )
        node.connect(epoch)  # before it answers anybody
        node.start()
        member.start()
        try:
            _until_over(over, stop, member, timeout)
        finally:
            member.stop()
            node.stop()
    return over[0] if over else "it was stopped"


def warm() -> None:
    """torch imports a good deal with the first optimizer, for seconds in which a shard would seem dead."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.0).step()


def _begun(roll: Roll) -> tuple[Job, str, Epoch] | None:
    over = roll.over()
    if over is not None:
        raise CommlibError(f"the job ended before it began: {over}")
    name = roll.newest()
    return (Job.unpack(roll.job(1.0)), name, roll.epoch(name)) if name else None


def _await(
    look: Callable[[], tuple[Job, str, Epoch] | None], wait: float | None, stop: threading.Event
) -> tuple[Job, str, Epoch]:
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


def _until_over(over: list[str], stop: threading.Event, member: Membership, timeout: float) -> None:
    while not over and not stop.wait(_LOOK_S):
        pass
    if over:
        return
    member.leave()
    end = time.monotonic() + timeout
    while not over and time.monotonic() < end:
        time.sleep(_LOOK_S)
    if not over:
        _log.warning("nobody took what this shard has for %g s; it ends all the same", timeout)


def place() -> str:
    """Host and process, for people."""
    return f"{socket.gethostname()} pid {os.getpid()}"
