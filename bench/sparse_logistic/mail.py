"""Waiting for messages of several ranks, each of which may send ahead; who has not come is named."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from commlib.errors import PeerLost
from commlib.messaging.endpoint import Endpoint

from .protocol import Kind, Line, Message


class Mail:
    """What comes to one rank, for one thread.

    Args:
        endpoint: its own.
        lines: by peer.
        timeout: seconds that anything is waited for.
    """

    def __init__(self, endpoint: Endpoint, lines: Mapping[int, Line], timeout: float) -> None:
        self._endpoint, self._lines, self._timeout = endpoint, lines, timeout
        self._here: dict[tuple[Kind, int, int], Message] = {}
        self._gone: dict[int, PeerLost] = {}

    def gather(self, kind: Kind, clock: int, peers: Iterable[int], what: str) -> list[Message]:
        """Messages of this kind and clock, one from each of these peers, in their order.

        Args:
            what: in words, for the error.

        Raises:
            PeerLost: some have not come in time, or cannot any more; all who are missing are named.
            ProtocolError: what came was none.
        """
        wanted = list(peers)
        end = time.monotonic() + self._timeout
        while missing := [p for p in wanted if (kind, clock, p) not in self._here]:
            if lost := [p for p in missing if p in self._gone]:
                raise self._lost(lost, what, f"; {self._gone[lost[0]]}") from self._gone[lost[0]]
            left = end - time.monotonic()
            if left <= 0:
                raise self._lost(missing, what, f": nothing came for {self._timeout:g} s")
            self._take(left)
        return [self._here.pop((kind, clock, p)) for p in wanted]

    def _take(self, seconds: float) -> None:
        try:
            frame = self._endpoint.recv(timeout=seconds)
        except PeerLost as e:
            if e.rank is not None:
                self._gone[e.rank] = e
            return
        if frame.sender in self._lines:
            for message in self._lines[frame.sender].take(frame):
                self._here[message.kind, message.clock, frame.sender] = message

    def _lost(self, missing: list[int], what: str, why: str) -> PeerLost:
        ranks = ", ".join(map(str, missing))
        error = PeerLost(f"rank {self._endpoint.rank} has no {what} from rank {ranks}{why}")
        error.rank = missing[0] if len(missing) == 1 else None
        return error
