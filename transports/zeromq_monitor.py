"""Notices peers that are gone: a connection that ended, and for seconds no new one in its place.

ZeroMQ connects again by itself, and says nothing of it; who waits for a peer that died would wait until the deadline.
Where nobody listens any more, which a host says at once if it is well, the peer has died or closed its endpoint. Where
nothing is heard, a wire may have been cut, and may be mended.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from commlib.messaging.peers import Gone

GRACE_S = 5.0
"""A wire that was cut is mended sooner: ZeroMQ tries again every 2 s at least."""
_EVERY_S = 0.5
_KNOCKS_S, _KNOCK_S = 1.0, 0.2  # between two, and for one: a host that does not answer holds up who reads
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Watch:
    """Watch over the sockets that send. :meth:`look` is for one thread at a time."""

    def __init__(self) -> None:
        self._monitors: dict[int, tuple[zmq.Socket[Any], zmq.Socket[Any]]] = {}  # (way, what it tells)
        self._addresses: dict[int, str] = {}
        self._ended: dict[int, float] = {}
        self._looked = self._knocked = 0.0

    def add(self, peer: int, way: zmq.Socket[Any], address: str) -> None:
        """The socket to a peer, before it connects to ``tcp://host:port``; in place of one there was."""
        self._addresses[peer] = address
        old = self._monitors.pop(peer, None)
        if old is not None:
            self._end(*old)
        self._monitors[peer] = way, way.get_monitor_socket(_EVENTS)

    def look(self, *, idle: bool) -> Iterable[Gone]:
        """Peers that are gone since the last look, each once.

        Args:
            idle: nothing else came; so there is time to look. Otherwise every half a second is enough.
        """
        now = time.monotonic()
        if not idle and now - self._looked < _EVERY_S:
            return []
        self._looked = now
        for peer, (_, monitor) in list(self._monitors.items()):
            while monitor.poll(0):
                if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                    self._ended.setdefault(peer, now)
                else:
                    self._ended.pop(peer, None)
        gone, knocks = [], now - self._knocked > _KNOCKS_S
        for peer, since in self._ended.items():
            if now - since > GRACE_S:
                gone.append(Gone(peer, f"its connection ended, and it has taken no new one for {GRACE_S:g} s"))
            elif knocks and now - since > _EVERY_S:
                self._knocked = now
                if not _nobody_listens(self._addresses[peer]):
                    continue
                gone.append(Gone(peer, "its connection ended, and nobody listens at its address any more"))
        for each in gone:
            self._ended[each.rank] = float("inf")  # told; it may come again
        return gone

    def close(self) -> None:
        """Gives the monitors back."""
        for way, monitor in self._monitors.values():
            self._end(way, monitor)

    def _end(self, way: zmq.Socket[Any], monitor: zmq.Socket[Any]) -> None:
        if not way.closed:
            way.disable_monitor()  # first: nobody reads any more what it would tell
        monitor.close(0)


def _nobody_listens(address: str) -> bool:
    """Whether the host of ``tcp://host:port`` says so. What does not answer in time may be there."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
