"""Notices peers that are gone: a connection that ended, and for seconds no new one in its place.

ZeroMQ connects again by itself, and says nothing of it; who waits for a peer that died would wait until the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from commlib.messaging.peers import Gone

GRACE_S = 5.0
"""A wire that was cut is mended sooner: ZeroMQ tries again every 2 s at least."""
_EVERY_S = 0.5
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Watch:
    """Watch over the sockets that send. :meth:`look` is for one thread at a time."""

    def __init__(self) -> None:
        self._monitors: dict[int, tuple[zmq.Socket[Any], zmq.Socket[Any]]] = {}  # (way, what it tells)
        self._ended: dict[int, float] = {}
        self._looked = 0.0

    def add(self, peer: int, way: zmq.Socket[Any]) -> None:
        """The socket to a peer, before it connects; in place of one there was."""
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
        gone = [peer for peer, since in self._ended.items() if now - since > GRACE_S]
        for peer in gone:
            self._ended[peer] = float("inf")  # told; it may come again
        return [Gone(peer, f"its connection ended, and it has taken no new one for {GRACE_S:g} s") for peer in gone]

    def close(self) -> None:
        """Gives the monitors back."""
        for way, monitor in self._monitors.values():
            self._end(way, monitor)

    def _end(self, way: zmq.Socket[Any], monitor: zmq.Socket[Any]) -> None:
        if not way.closed:
            way.disable_monitor()  # first: nobody reads any more what it would tell
        monitor.close(0)
