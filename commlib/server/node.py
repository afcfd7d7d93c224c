"""A shard behind an endpoint, and a worker's client behind one. Thin: what decides is in shard.py and client.py.

Ordering: a shard is touched by its node's thread only, and its messages leave in the order in which it gave them: what
a peer has no room for waits in its own row, and nobody else's. So a slow worker holds up itself, not the shard. A
client is touched under its node's lock, and its messages are handed over under it, too.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from commlib.endpoint import Endpoint
from commlib.errors import CommlibError, PeerLost, ProtocolError
from commlib.frame import Buffer
from commlib.server.client import Client
from commlib.server.messages import Ack, Complaint, Message, Pull, Push, Replicated, Send
from commlib.server.shard import Shard
from commlib.server.wire import pack, unpack

_log = logging.getLogger("commlib")
_SLICE_S, _SOON_S = 0.25, 0.005  # between two looks: at nothing, and at peers that had no room


class ShardNode:
    """Serves from :meth:`start` to :meth:`stop`.

    Args:
        endpoint: connected to all workers and shards; its owner closes it, afterwards.
        shard: what it serves.
        ranks: shard → its endpoint's rank. Workers' endpoints have their own ranks.
    """

    def __init__(self, endpoint: Endpoint, shard: Shard, ranks: Mapping[str, int]) -> None:
        self._endpoint, self._shard, self._ranks = endpoint, shard, ranks
        self._names = {rank: name for name, rank in ranks.items()}
        self._rows: dict[int, collections.deque[tuple[Buffer, ...]]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"commlib-shard-{shard.name}", daemon=True)

    def start(self) -> None:
        """Begins, in a thread of its own."""
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends it; again: nothing."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                frame = self._endpoint.recv(timeout=_SOON_S if self._rows else _SLICE_S)
                self._send(self._answers(frame.sender, frame.parts))
            except PeerLost as e:  # nothing came; or one is gone, and its messages with it
                if e.rank is not None:
                    self._rows.pop(e.rank, None)
                    _log.info("shard %s: %s", self._shard.name, e)
            except CommlibError as e:
                if not self._ended.is_set():
                    _log.error("shard %s ends: %s", self._shard.name, e)
                return
            self._leave()

    def _answers(self, sender: int, parts: Sequence[Buffer]) -> list[Send]:
        try:
            message = unpack(parts)
            self._check(sender, message)
            sends = self._shard.handle(message)
        except ProtocolError as e:
            _log.warning("shard %s refused a message of rank %d: %s", self._shard.name, sender, e)
            return [(sender, Complaint(0, str(e)[:1000]))]
        for _, sent in sends:
            if isinstance(sent, Ack) and sent.refused:
                what = f"push {sent.stamp} of worker {sent.worker} to {sent.key}"
                _log.warning("shard %s refused %s: it is not finite", self._shard.name, what)
        return sends

    def _check(self, sender: int, message: Message) -> None:
        """Nobody speaks for another."""
        if isinstance(message, Push | Pull):
            if message.worker != sender:
                raise ProtocolError(f"rank {sender} speaks for worker {message.worker}")
        elif isinstance(message, Replicated):
            if self._names.get(sender) != message.shard:
                raise ProtocolError(f"rank {sender} speaks for shard {message.shard}")
        elif sender not in self._names:
            raise ProtocolError(f"rank {sender} is no shard, and sends a {type(message).__name__}")

    def _send(self, sends: Sequence[Send]) -> None:
        for to, message in sends:
            rank = self._ranks[to] if isinstance(to, str) else to
            self._rows.setdefault(rank, collections.deque()).append(pack(message))

    def _leave(self) -> None:
        for rank, row in list(self._rows.items()):
            try:
                while row and self._endpoint.offer(rank, parts=row[0]) is not None:
                    row.popleft()
            except (PeerLost, ValueError) as e:  # it is gone, or was never here
                _log.info("shard %s has nobody to send to at rank %d: %s", self._shard.name, rank, e)
                row.clear()
            if not row:
                del self._rows[rank]


class ClientNode:
    """A worker's.

    Args:
        endpoint: connected to all shards; its owner closes it.
        client: of this rank.
        ranks: shard → its endpoint's rank.
        timeout: seconds that anything waits.
    """

    def __init__(self, endpoint: Endpoint, client: Client, ranks: Mapping[str, int], timeout: float = 60.0) -> None:
        self._endpoint, self._client, self._ranks, self._timeout = endpoint, client, ranks, timeout
        self._names = {rank: name for name, rank in ranks.items()}
        self._lock = threading.Lock()

    def push(self, key: str, gradient: Tensor) -> None:
        """Sends a gradient, (n,), which must stay as it is until it is acknowledged. Waits only for room.

        Raises:
            PeerLost: the shard takes nothing in time.
        """
        with self._lock:
            self._send(self._client.push(key, gradient))

    def pull(self, key: str) -> None:
        """Asks for values; waits only for room."""
        with self._lock:
            self._send(self._client.pull(key))

    def values(self, key: str) -> Tensor:
        """What comes of the last question, (n,).

        Raises:
            PeerLost: nothing in time; the shard is named.
            ProtocolError: a shard complains of what it got.
        """
        found: list[Tensor] = []

        def here() -> bool:
            came = self._client.values(key)
            found[:] = [came[0]] if came is not None else []
            return came is not None

        self._until(here, f"values of {key}")
        return found[0]

    def flush(self) -> None:
        """Waits until all that was pushed is acknowledged.

        Raises:
            PeerLost, ProtocolError: as :meth:`values`.
        """
        self._until(lambda: not self._client.unacknowledged, "acknowledgements")

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self._timeout
        while True:
            with self._lock:
                if ready():
                    return
            left = end - time.monotonic()
            if left <= 0:
                raise PeerLost(f"no {what} came within {self._timeout:g} s from shards {', '.join(self._ranks)}")
            try:
                frame = self._endpoint.recv(timeout=min(left, _SLICE_S))
            except PeerLost as e:
                if e.rank is None:
                    continue
                raise PeerLost(f"shard {self._names.get(e.rank, e.rank)} is gone: {e}") from e
            message = unpack(frame.parts)
            if isinstance(message, Complaint):
                raise ProtocolError(f"shard {self._names.get(frame.sender, frame.sender)}: {message.why}")
            with self._lock:
                self._client.handle(message)

    def _send(self, sends: Sequence[Send]) -> None:
        for to, message in sends:
            assert isinstance(to, str)  # a client's messages are for shards
            self._endpoint.send(self._ranks[to], timeout=self._timeout, parts=pack(message))
