"""Where members of a job meet: a store of torch.distributed, at one address that all know.

Whoever keeps it decides how long a job can live: the first worker of an embedded one, else ``commlib server meet``.
Nothing that is trained goes through it, so it may be far away and slow; without it, training goes on until members
must agree on something new, and they end then.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

from torch._C import _distributed_c10d as c10d

from commlib.errors import CommlibError
from commlib.groups.store import DeadlineStore

PORT = 29400


def keep(host: str, port: int = 0) -> c10d.TCPStore:
    """A new meeting place in this process, at this address and no other; 0 takes a free port.

    Raises:
        CommlibError: the address cannot be had.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as e:
        raise CommlibError(f"members cannot meet at {host}:{port}: {e.strerror or e}") from e
    port = listening.getsockname()[1]
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening.detach()}
    try:
        return c10d.TCPStore(host, port, **options)
    except NotImplementedError:  # that of torch 2.7 is by libuv, which takes no socket there; the socket is open still
        return c10d.TCPStore(host, port, **options, use_libuv=False)


def parse(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ValueError: it is no address.
    """
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"members meet at HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


def visit(address: str, job: str, timeout: float) -> DeadlineStore:
    """The store at an address, as members of a job see it, which answers in ``timeout`` seconds or not at all; each
    thread that uses it has its own.

    Raises:
        CommlibError: nobody is there in time.
    """
    host, port = parse(address)
    try:
        store = c10d.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout))
    except RuntimeError as e:
        raise CommlibError(
            f"no rendezvous server at {address} after {timeout:g} s: is 'commlib server meet' running there, "
            "and is the address reachable?"
        ) from e
    return DeadlineStore(c10d.PrefixStore(f"commlib/{job}", store), timeout)
