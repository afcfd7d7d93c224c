"""Bytes counted where they leave: at this process's TCP sockets.

Linux keeps, for every TCP connection, the payload bytes it has sent, received and sent again. Read from
outside the library that uses the socket (Gloo, NCCL, ZeroMQ), they check what an exchange says it sends.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import stat
import struct

# struct tcp_info of <linux/tcp.h>: where the u64 counters stand. New fields only ever come after them.
_BYTES_RECEIVED = 128
_BYTES_SENT = 200
_BYTES_RESENT = 208
_LENGTH = 216


@dataclasses.dataclass(frozen=True)
class SocketCounters:
    """TCP payload bytes of this process's open connections; ``sent`` counts what was sent again only once."""

    sent: int
    received: int
    resent: int

    def __sub__(self, other: SocketCounters) -> SocketCounters:
        return SocketCounters(self.sent - other.sent, self.received - other.received, self.resent - other.resent)


def traffic() -> SocketCounters | None:
    """Totals over the TCP connections open now; None where the system does not count (not Linux ≥ 4.19).

    Connections that open or close between two calls make their difference wrong: ask while they stand.
    """
    if not os.path.isdir("/proc/self/fd") or not hasattr(socket, "TCP_INFO"):
        return None
    sent = received = resent = 0
    for entry in os.listdir("/proc/self/fd"):
        info = _tcp_info(int(entry))
        if info is None:
            continue
        if len(info) < _LENGTH:
            return None
        (received_here,) = struct.unpack_from("Q", info, _BYTES_RECEIVED)
        sent_here, resent_here = struct.unpack_from("QQ", info, _BYTES_SENT)
        sent, received, resent = sent + sent_here - resent_here, received + received_here, resent + resent_here
    return SocketCounters(sent, received, resent)


def _tcp_info(fd: int) -> bytes | None:
    """The connection's tcp_info; None if the descriptor is no connected TCP socket."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        copy = os.dup(fd)
    except OSError:
        return None  # closed meanwhile
    try:
        with socket.socket(fileno=copy) as s:
            if s.type != socket.SOCK_STREAM or s.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            s.getpeername()  # a listener's counters are other things
            return s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None  # not connected
