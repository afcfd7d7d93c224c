"""Endpoints that count the bytes they send: all parts of all frames with their headers, greetings and credits too.

What carries the frames is not counted: ZeroMQ's 2 to 9 bytes a part, and the headers of TCP, IP and Ethernet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.messaging.endpoint import Endpoint, Sent
from commlib.messaging.frame import Buffer
from commlib.transports.inproc import InProc
from commlib.transports.zeromq import ZeroMQ


class OverTcp(ZeroMQ):
    """A :class:`ZeroMQ` on this machine's loopback; arguments as there."""

    def __init__(self, rank: int, **options: Any) -> None:
        super().__init__(rank, **options)
        self.sent = 0

    def _put(self, peer: int, buffers: Sequence[Buffer]) -> Sent:
        self.sent += nbytes(buffers)
        return super()._put(peer, buffers)


class InThreads(InProc):
    """An :class:`InProc`; arguments as there."""

    def __init__(self, rank: int, **options: Any) -> None:
        super().__init__(rank, **options)
        self.sent = 0

    def _put(self, peer: int, buffers: Sequence[Buffer]) -> Sent:
        self.sent += nbytes(buffers)
        return super()._put(peer, buffers)


Counted = OverTcp | InThreads


def nbytes(buffers: Sequence[Buffer]) -> int:
    """Bytes of all parts."""
    return sum(memoryview(b).nbytes for b in buffers)


def connect(endpoint: Endpoint, addresses: Sequence[str], peers: Sequence[int]) -> None:
    """Connect to each of these peers; addresses by rank."""
    for peer in peers:
        endpoint.connect(peer, addresses[peer])
