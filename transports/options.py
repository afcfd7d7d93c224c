"""Options of the backend; what the user does not tell is found out, or read from the environment."""

from __future__ import annotations

import dataclasses
import os

from commlib.messaging import flow_control
from commlib.messaging import keys as stored
from commlib.messaging.network import address_of

_YES, _NO = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


@dataclasses.dataclass(frozen=True)
class Options:
    """Options for ``init_process_group("zmq", pg_options=…)``; later groups of the process are made like the default
    one.

    Args:
        host: the interface to use, by its name or its address. Default: ``$COMMLIB_HOST``; else loopback, if all ranks
            share this machine; else the one from which the route to the store's host goes out.
        keys: this host's. Default: the pair ``$COMMLIB_KEY``, or ``default``, that ``commlib keys new`` made.
            Ranks that share a machine need none.
        insecure: go beyond this machine without keys. Default: ``$COMMLIB_INSECURE``, or no.
        any_source: take connections from anywhere, not only from the addresses that the ranks listen at: for networks
            that change addresses on the way (NAT). Default: ``$COMMLIB_ANY_SOURCE``, or no.
        window: bytes on their way to one rank that does not take them, at most. The same on all ranks.
    """

    host: str | None = None
    keys: stored.KeyPair | None = None
    insecure: bool | None = None
    any_source: bool | None = None
    window: int = flow_control.WINDOW

    def wanted_host(self) -> str | None:
        """An address, if one is asked for.

        Raises:
            ValueError: an interface that there is not, or has no address.
        """
        given = self.host or os.environ.get("COMMLIB_HOST")
        return address_of(given) if given else None

    def goes_insecure(self) -> bool:
        """Whether nothing shall be kept secret.

        Raises:
            ValueError: the environment says neither yes nor no.
        """
        return _said("COMMLIB_INSECURE") if self.insecure is None else self.insecure

    def hears_any_source(self) -> bool:
        """Whether ranks may come from other addresses than they listen at.

        Raises:
            ValueError: the environment says neither yes nor no.
        """
        return _said("COMMLIB_ANY_SOURCE") if self.any_source is None else self.any_source

    def pair(self) -> stored.KeyPair:
        """This host's keys.

        Raises:
            AuthenticationError: there are none.
        """
        return self.keys or stored.load(os.environ.get("COMMLIB_KEY", "default"))


def _said(name: str) -> bool:
    said = os.environ.get(name, "").lower()
    if said not in _YES | _NO:
        raise ValueError(f"{name} is 1 or 0, got {said!r}")
    return said in _YES
