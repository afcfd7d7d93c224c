"""Endpoints for members of a job that come and go: at the interface that leads to where they meet."""

from __future__ import annotations

from typing import Any

from commlib.messaging import keys
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.network import address_towards
from commlib.transports.inproc import InProc
from commlib.transports.options import Options
from commlib.transports.zeromq import ZeroMQ, is_loopback


def open_zeromq(rank: int, *, job: str, towards: str, timeout: float, window: int) -> Endpoint:
    """A ZeroMQ endpoint, as the environment says (``COMMLIB_HOST``, ``_KEY``, ``_INSECURE``).

    Args:
        rank: its own.
        job: endpoints of another one are strangers; with what nobody else knows in it, nothing of theirs is kept.
        towards: the host where members meet: without ``COMMLIB_HOST``, the interface towards it is used.
        timeout: seconds that anything waits.
        window: bytes on their way to one peer at most; the same on all.

    Raises:
        AuthenticationError: beyond this machine, and there are no keys.
        CommlibError: there is no way to the host.
        ValueError: the environment says what cannot be.
    """
    options = Options()
    host = options.wanted_host() or address_towards(towards)
    given: dict[str, Any] = {"host": host, "timeout": timeout, "window": window, "secret": job}
    if not is_loopback(host):
        if options.goes_insecure():
            given["insecure"] = True
        else:
            pair = options.pair()
            given |= {"keys": pair, "allowed": {pair.public, *keys.allowed()}}
    return ZeroMQ(rank, job=job, **given)


def open_inproc(rank: int, *, job: str, towards: str, timeout: float, window: int) -> Endpoint:
    """An endpoint for members that are threads of this process; ``towards`` makes no difference."""
    return InProc(rank, job=job, timeout=timeout, window=window)
