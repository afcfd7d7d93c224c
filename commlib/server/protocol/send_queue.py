"""Queue of what is to leave an endpoint, a row for each peer: one that takes nothing holds up nobody else.

Ordering: for one thread at a time (its owner's, or under its owner's lock). A peer's frames of the same urgency leave
in the order in which they were put, for none is offered before those that wait; more urgent ones overtake. All that is
said of a key has the key's urgency, and no two keys need to know of each other.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from commlib.errors import PeerLost
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.frame import Buffer
from commlib.server.protocol.messages import Message
from commlib.server.protocol.wire import heavy, pack

_MOST = 256  # messages in a frame


@dataclasses.dataclass(order=True, frozen=True)
class _Waiting:
    urgency: int
    number: int
    parts: tuple[Buffer, ...] = dataclasses.field(compare=False)


class SendQueue:
    """Queue of one endpoint: messages that wait for room at their receivers.

    Args:
        endpoint: this.
        lost: is told of a peer that cannot be sent to, and why: what was in its row is dropped.
        urgency: of keys: lower leaves first. Others, and all keys by default: 0.
    """

    def __init__(
        self, endpoint: Endpoint, lost: Callable[[int, str], None], urgency: Mapping[str, int] | None = None
    ) -> None:
        self._endpoint, self._lost, self._urgency = endpoint, lost, urgency or {}
        self._rows: dict[int, list[_Waiting]] = {}  # heaps
        self._count = itertools.count()

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._rows)

    def put(self, *sends: tuple[int, Message]) -> int:
        """Sends messages to ranks, now if there is room, else when there is; returns their bytes.

        What goes to one rank is in as few frames as have one urgency and one tensor each.
        """
        frames: dict[int, list[list[Message]]] = {}
        for rank, message in sends:
            row = frames.setdefault(rank, [[]])
            if row[-1] and not self._together(row[-1], message):
                row.append([])
            row[-1].append(message)
        return sum(self._put(rank, frame) for rank, row in frames.items() for frame in row)

    def _together(self, frame: Sequence[Message], message: Message) -> bool:
        full = len(frame) == _MOST or (heavy(message) and any(map(heavy, frame)))
        return not full and self._urgent(message) == self._urgent(frame[0])

    def _urgent(self, message: Message) -> int:
        return self._urgency.get(getattr(message, "key", ""), 0)

    def _put(self, rank: int, frame: Sequence[Message]) -> int:
        parts, row = pack(*frame), self._rows.setdefault(rank, [])
        heapq.heappush(row, _Waiting(self._urgent(frame[0]), next(self._count), parts))
        if len(row) == 1:
            self._leave(rank)
        return sum(len(part) for part in parts)

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
            while row and self._endpoint.offer(rank, parts=row[0].parts) is not None:
                heapq.heappop(row)
        except (PeerLost, ValueError) as e:  # it is gone, or was never here
            row.clear()
            self._lost(rank, str(e))
        if not row:
            del self._rows[rank]
