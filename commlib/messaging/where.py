"""Where this process is: its machine, its addresses, and the way to another."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

from commlib.errors import CommlibError
from commlib.messaging.network import network


def address_of(given: str) -> str:
    """Of an interface's name, its first address; an address is one already.

    Raises:
        ValueError: neither.
    """
    interfaces = network()["interfaces"]
    known = {address: name for name, i in interfaces.items() for address in i["addresses"]}
    if given in known or given.startswith("127."):
        return given
    if given in interfaces and interfaces[given]["addresses"]:
        return interfaces[given]["addresses"][0]
    there = ", ".join(f"{name} ({', '.join(i['addresses']) or 'no address'})" for name, i in interfaces.items())
    raise ValueError(f"COMMLIB_HOST is an interface of this machine or its address, got {given!r}; there are {there}")


def address_towards(host: str) -> str:
    """This machine's address on the way to another; nothing is sent.

    Raises:
        CommlibError: there is no way.
    """
    try:
        family, kind, protocol, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as s:
            s.connect(there)
            return str(s.getsockname()[0])
    except OSError as e:
        raise CommlibError(
            f"no way to the store's host {host!r} ({e.strerror}): name the interface by COMMLIB_HOST"
        ) from e


def store_host(store: Any) -> str | None:
    """Where the store is, if it is one of the network."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    found = getattr(store, "host", None) or os.environ.get("MASTER_ADDR")
    return str(found) if found else None


def machine() -> str:
    """The same on all ranks that reach each other by loopback, and on no others."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):  # network namespaces, such as containers', are machines of their own
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)
