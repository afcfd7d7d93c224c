"""The network interfaces of this machine, and which of them Gloo and NCCL would pick.

Where this process is: its machine, its addresses, and the way to another.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Any, TypedDict

from commlib.errors import CommlibError

_CLASS_NET = Path("/sys/class/net")
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: the IPv4 address of an interface


class Interface(TypedDict):
    """Network interface of this host; ``mbit`` is None where the driver does not say (loopback, most containers)."""

    addresses: list[str]
    mbit: int | None
    up: bool


class Network(TypedDict):
    """All interfaces by name, and the name each backend would use; None if it finds none."""

    interfaces: dict[str, Interface]
    gloo: str | None
    nccl: str | None


def network() -> Network:
    """Look at the interfaces; changes nothing and sends nothing."""
    found = {
        name: Interface(addresses=_ipv4(name) + _ipv6(name), mbit=_speed(name), up=_is_up(name))
        for _, name in socket.if_nameindex()
    }
    return {
        "interfaces": found,
        "gloo": gloo_choice(found, os.environ.get("GLOO_SOCKET_IFNAME")),
        "nccl": nccl_choice(found, os.environ.get("NCCL_SOCKET_IFNAME")),
    }


def gloo_choice(interfaces: dict[str, Interface], wanted: str | None) -> str | None:
    """The interface PyTorch binds Gloo to: the one asked for, else the host name's, else the loopback.

    Args:
        interfaces: as in :class:`Network`.
        wanted: the value of ``GLOO_SOCKET_IFNAME``: one name, or several with commas between.
    """
    if wanted:
        names = wanted.split(",")
        return wanted if all(n in interfaces for n in names) else None
    try:
        resolved = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        resolved = set()
    usable = [n for n, i in interfaces.items() if resolved & set(i["addresses"])]
    return next(iter(usable or [n for n in interfaces if n == "lo"]), None)


def nccl_choice(interfaces: dict[str, Interface], wanted: str | None) -> str | None:
    """The interface NCCL takes for its sockets.

    ``NCCL_SOCKET_IFNAME`` is a list of name prefixes, ``^`` before it excludes them and ``=`` asks for
    the exact names. Without it: ``ib*``, then anything but docker and loopback, then docker, then
    loopback. Only interfaces that are up and have an address count.
    """
    ready = [n for n, i in interfaces.items() if i["up"] and i["addresses"]]
    rules = [wanted] if wanted else ["ib", "^docker,lo", "docker", "lo"]
    return next((n for rule in rules for n in ready if _matches(n, rule)), None)


def _matches(name: str, rule: str) -> bool:
    excluded, rule = rule.startswith("^"), rule.removeprefix("^")
    exact, rule = rule.startswith("="), rule.removeprefix("=")
    hit = any(name == part if exact else name.startswith(part) for part in rule.split(","))
    return hit != excluded


def _ipv4(name: str) -> list[str]:
    try:
        import fcntl  # not on Windows
    except ImportError:
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return []  # no IPv4 address, or not Linux
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6(name: str) -> list[str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]  # address in hex, index, prefix, scope, flags, name
    return [str(ipaddress.IPv6Address(int(f[0], 16))) for f in fields if f[-1] == name]


def _speed(name: str) -> int | None:
    try:
        mbit = int((_CLASS_NET / name / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # the driver does not know
    return mbit if mbit > 0 else None


def _is_up(name: str) -> bool:
    try:
        flags = int((_CLASS_NET / name / "flags").read_text(encoding="ascii"), 16)
    except (OSError, ValueError):
        return bool(_ipv4(name) or _ipv6(name))
    return bool(flags & 1)  # IFF_UP


def address_of(given: str) -> str:
    """First address of an interface, by its name; an address is one already.

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
