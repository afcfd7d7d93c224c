"""Notices peers that are gone: a connection that ended, for seconds no new one in its place, and nothing more comes.

ZeroMQ connects again by itself, and says nothing of it; who waits for a peer that died would wait until the deadline.
Where nobody listens any more, which a host says at once if it is well, the peer has died or closed its endpoint. Where
nothing is heard, a wire may have been cut, and may be mended.

A host sends on what a process has left behind, over a slow link for long. So a peer is gone only once its own
connection has ended too, or has been silent. A message of many bytes comes all at once: only the kernel knows that it
is under way.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from commlib.messaging.peers import Gone

GRACE_S = 5.0
"""A wire that was cut is mended sooner: ZeroMQ tries again every 2 s at least."""
_EVERY_S = 0.5
_KNOCKS_S, _KNOCK_S = 1.0, 0.2  # between two, and for one: a host that does not answer holds up who reads
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_FORGETS = 256  # connections of which some may have ended
_TCP_INFO, _LAST_DATA_CAME, _INFO_BYTES = getattr(socket, "TCP_INFO", None), 52, 56  # linux/tcp.h: tcpi_last_data_recv


class Watch:
    """Watch over the sockets that send, and the connections of what comes. For one thread at a time, but for ``add``.

    Args:
        connection: over which a rank's frames come; None, if none have.
    """

    def __init__(self, connection: Callable[[int], Hashable]) -> None:
        self._connection = connection
        self._sources: dict[Hashable, tuple[int, int]] = {}  # what comes over a connection: (descriptor, inode)
        self._most = _FORGETS
        self._monitors: dict[int, tuple[zmq.Socket[Any], zmq.Socket[Any]]] = {}  # (way, what it tells)
        self._addresses: dict[int, str] = {}
        self._ended: dict[int, float] = {}
        self._quiet: set[int] = set()  # peers of which nothing more came at the last look
        self._looked = self._knocked = 0.0

    def add(self, peer: int, way: zmq.Socket[Any], address: str) -> None:
        """The socket to a peer, before it connects to ``tcp://host:port``; in place of one there was."""
        self._addresses[peer] = address
        old = self._monitors.pop(peer, None)
        if old is not None:
            self._end(*old)
        self._monitors[peer] = way, way.get_monitor_socket(_EVENTS)

    def came(self, connection: Hashable, frame: zmq.Frame) -> None:
        """Note where a connection's frames come from, at each."""
        if connection in self._sources:
            return
        if len(self._sources) >= self._most:  # strangers come and go
            self._sources = {c: (d, inode) for c, (d, inode) in self._sources.items() if _inode(d) == inode}
            self._most = max(_FORGETS, 2 * len(self._sources))
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # who greets as ZeroMQ before version 3 did, or in no way, is none of ours
            return
        inode = _inode(descriptor)
        if inode is not None:
            self._sources[connection] = descriptor, inode

    def look(self, *, idle: bool, drained: bool) -> Iterable[Gone]:
        """Peers that are gone since the last look, each once.

        Args:
            idle: nothing else came; so there is time to look. Otherwise every half a second is enough.
            drained: nothing that has come is still to be read; without, what a peer said last may be.
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
                    self._quiet.discard(peer)
        gone, knocks = [], now - self._knocked > _KNOCKS_S
        for peer, since in self._ended.items() if drained else ():
            if self._silent_s(peer) < GRACE_S:
                self._quiet.discard(peer)
                continue
            if peer not in self._quiet:  # its last word may have come since nothing was there to be read
                self._quiet.add(peer)
                continue
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

    def _silent_s(self, peer: int) -> float:
        """Seconds since a byte came of a peer, as the kernel counts them; without end if its connection has ended."""
        descriptor, inode = self._sources.get(self._connection(peer), (-1, None))
        if _TCP_INFO is None or inode is None or _inode(descriptor) != inode:
            return float("inf")
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            found = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
            return float(struct.unpack_from("@I", found, _LAST_DATA_CAME)[0]) / 1e3
        return float("inf")

    def _end(self, way: zmq.Socket[Any], monitor: zmq.Socket[Any]) -> None:
        if not way.closed:
            way.disable_monitor()  # first: nobody reads any more what it would tell
        monitor.close(0)


def _inode(descriptor: int) -> int | None:
    """Number of what is open there, which a later one at this descriptor does not have."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


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
