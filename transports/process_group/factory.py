"""Makes the process groups of the backend ``"zmq"``; torch.distributed calls it, on all ranks of a group alike."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from typing import Any

from commlib.errors import CommlibError
from commlib.groups.handshake import begin_roll_call, roll_call_at
from commlib.groups.store import ANSWER_S, DeadlineStore
from commlib.groups.world import World
from commlib.transports.options import Options
from commlib.transports.process_group.algorithms import choice
from commlib.transports.process_group.algorithms.steps import Position
from commlib.transports.zeromq import ZeroMQ

from . import rendezvous
from .engine import Engine
from .group import ZmqGroup
from .p2p import Mailbox

_defaults: list[Options] = []
_live: weakref.WeakSet[ZmqGroup] = weakref.WeakSet()


def create(about: Any, options: Options | None = None) -> ZmqGroup:
    """Make a process group over endpoints.

    Args:
        about: torch.distributed's: store, group_rank, group_size, timeout, group_id.
        options: None: those that were given last.

    Raises:
        TypeError: options of another backend.
        PeerLost: a rank does not come in time.
        AuthenticationError: keys are needed, and there are none, or a rank's is not allowed.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options of the zmq backend are its Options, got {type(options).__name__}")
    if options is not None:
        _defaults[:] = [options]
    chosen = _defaults[-1] if _defaults else Options()
    world, timeout = World(about.group_rank, about.group_size), about.timeout
    seconds: float = timeout.total_seconds()
    store = DeadlineStore(about.store, min(seconds, ANSWER_S))
    job = str(about.group_id)
    try:
        open_endpoint = rendezvous.opener(store, "zmq", world, chosen, seconds)
        endpoint = open_endpoint(job)
    except BaseException as e:
        rendezvous.decline(store, "zmq/at", world, e)
        raise
    try:
        rendezvous.introduce(store, "zmq/at", world, endpoint)
        rendezvous.hear(store, "zmq/at", world, seconds)
        for peer in range(world.size):
            if peer != world.rank:
                rendezvous.connect(store, "zmq/at", peer, endpoint, seconds)
        line = rendezvous.measure(store, "zmq", world, endpoint, seconds)
    except BaseException as e:
        endpoint.abort(f"{type(e).__name__}: {e}")
        raise

    def open_mail() -> ZeroMQ:
        found = open_endpoint(f"{job} mail")
        rendezvous.introduce(store, "zmq/mail", world, found)
        return found

    reach = functools.partial(rendezvous.connect, store, "zmq/mail")
    roll = store, "zmq/roll", world
    begin, call = functools.partial(begin_roll_call, *roll), functools.partial(roll_call_at, *roll)
    engine = Engine(endpoint, job, begin, call)
    place = Position(world.rank, world.size, choice.piece(line))
    mail = Mailbox(place, open_mail, reach)
    closing = threading.Lock()
    closed: list[bool] = []

    def shut() -> None:
        with closing:
            if closed:
                return
            closed.append(True)
        error = CommlibError(f"the process group {job!r} was destroyed")
        engine.close(error)
        mail.close(error)
        endpoint.close()
        engine.join(5.0)

    group = ZmqGroup(about.store, place, timeout, engine, line, shut, mail=mail)
    _live.add(group)
    return group


@atexit.register
def _leave() -> None:
    """Shut down the groups that nobody has destroyed, so that all that was sent leaves."""
    for group in list(_live):
        group.shutdown()


os.register_at_fork(after_in_child=_live.clear)  # they are its parent's, as their threads and sockets are
