"""``inproc``: endpoints within one process, over queues. For tests, and for a server beside its worker."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Sequence
from typing import Any

from commlib.messaging.endpoint import Endpoint, Sent
from commlib.messaging.frame import Buffer
from commlib.messaging.peers import Arrival

_SCHEME = "inproc://"
_inboxes: dict[str, queue.SimpleQueue[Arrival]] = {}
_names = itertools.count()
_lock = threading.Lock()


class _Copied:
    """Frames are copied when they are sent."""

    def wait(self, timeout: float) -> bool:
        return True


class InProc(Endpoint):
    """An endpoint that others of this process reach. Bytes are copied once, when they are sent.

    Args:
        rank: this one's.
        name: of its own in this process; one that is free if it is not given.
        options: of :class:`~commlib.messaging.endpoint.Endpoint`.

    Raises:
        ValueError: the name is taken.
    """

    def __init__(self, rank: int, *, name: str | None = None, **options: Any) -> None:
        super().__init__(rank, **options)
        self._name = name or f"endpoint-{next(_names)}"
        with _lock:
            if self._name in _inboxes:
                raise ValueError(f"there is an endpoint {self._name!r} in this process already")
            self._inbox = _inboxes[self._name] = queue.SimpleQueue()
        self._ways: dict[int, tuple[str, object]] = {}

    @property
    def address(self) -> str:
        return _SCHEME + self._name

    def _open(self, peer: int, address: str, key: str | None) -> None:
        if not address.startswith(_SCHEME):
            raise ValueError(f"an address within a process is {_SCHEME}name, got {address!r}")
        if key is not None:
            raise ValueError("there are no keys within a process")
        self._ways[peer] = address.removeprefix(_SCHEME), object()

    def _put(self, peer: int, buffers: Sequence[Buffer]) -> Sent:
        name, connection = self._ways[peer]
        arrival = Arrival(connection, None, [bytes(b) for b in buffers])
        with _lock:
            inbox = _inboxes.get(name)
        if inbox is not None:
            inbox.put(arrival)
        return _Copied()

    def _take(self, seconds: float) -> Sequence[Arrival]:
        came: list[Arrival] = []
        with contextlib.suppress(queue.Empty):
            came.append(self._inbox.get(block=seconds > 0, timeout=seconds))
            while True:
                came.append(self._inbox.get_nowait())
        return came

    def _shut(self, peers: Sequence[int], seconds: float) -> None:
        with _lock:
            del _inboxes[self._name]
