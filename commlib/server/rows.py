"""What is to leave an endpoint, in a row for each peer: one that takes nothing holds up nobody else.

Ordering: for one thread at a time (its owner's, or under its owner's lock). A peer's frames leave in the order in which
they were put, for none is offered before those that wait.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection

from commlib.endpoint import Endpoint
from commlib.errors import PeerLost
from commlib.frame import Buffer


class Rows:
    """Of one endpoint.

    Args:
        endpoint: this.
        lost: is told of a peer that cannot be sent to, and why: what was in its row is dropped.
    """

    def __init__(self, endpoint: Endpoint, lost: Callable[[int, str], None]) -> None:
        self._endpoint, self._lost = endpoint, lost
        self._rows: dict[int, collections.deque[tuple[Buffer, ...]]] = {}

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._rows)

    def put(self, rank: int, parts: tuple[Buffer, ...]) -> None:
        """Sends it, now if there is room, else when there is."""
        self._rows.setdefault(rank, collections.deque()).append(parts)
        if len(self._rows[rank]) == 1:
            self._leave(rank)

    def leave(self) -> None:
        """Sends what there is room for."""
        for rank in list(self._rows):
            self._leave(rank)

    def keep(self, ranks: Collection[int]) -> None:
        """Drops what is for others."""
        for rank in self._rows.keys() - set(ranks):
            del self._rows[rank]

    def _leave(self, rank: int) -> None:
        row = self._rows[rank]
        try:
            while row and self._endpoint.offer(rank, parts=row[0]) is not None:
                row.popleft()
        except (PeerLost, ValueError) as e:  # it is gone, or was never here
            row.clear()
            self._lost(rank, str(e))
        if not row:
            del self._rows[rank]
