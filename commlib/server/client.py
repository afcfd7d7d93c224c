"""A worker's side: what it has pushed, what of it is acknowledged, and what it waits for. Pure: messages in and out.

A push is kept until it is acknowledged, and sent again to whoever owns its key in a new view; so are questions. What
came before counts once (:class:`~commlib.ledger.Ledger`), so it does no harm that it comes again.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

from torch import Tensor

from commlib.server.messages import Ack, Message, Pull, Push, Send, Values
from commlib.server.view import View


class Client:
    """Of one worker.

    Args:
        rank: its.
        view: one with this worker in it.
    """

    def __init__(self, rank: int, view: View) -> None:
        self._rank, self._view = rank, view
        self._due = dict.fromkeys(view.places, view.workers[rank])  # key → stamp of the next push
        self._kept: dict[str, dict[int, Tensor]] = collections.defaultdict(dict)  # key → stamp → gradient
        self._asked: dict[str, int] = {}  # key → clock
        self._values: dict[str, tuple[Tensor, Mapping[int, int]]] = {}
        self.refused: list[tuple[str, int]] = []
        """(key, stamp) of pushes that were not finite."""

    @property
    def unacknowledged(self) -> int:
        """Pushes."""
        return sum(map(len, self._kept.values()))

    def clock(self, key: str) -> int:
        """How often it has pushed a key; and before it came, others."""
        return self._due[key]

    def push(self, key: str, gradient: Tensor) -> list[Send]:
        """Sends a gradient, (n,), which must stay as it is until it is acknowledged."""
        stamp = self.clock(key)
        self._due[key] = stamp + 1
        self._kept[key][stamp] = gradient
        return [self._to(key, Push(self._view.number, key, self._rank, stamp, gradient))]

    def pull(self, key: str) -> list[Send]:
        """Asks for values that are new enough for its clock of this key."""
        self._values.pop(key, None)
        self._asked[key] = self.clock(key)
        return [self._to(key, Pull(self._view.number, key, self._rank, self.clock(key)))]

    def values(self, key: str) -> tuple[Tensor, Mapping[int, int]] | None:
        """What came of the last question, and whose pushes are in it; None as long as nothing has."""
        return self._values.get(key)

    def handle(self, message: Message) -> None:
        """Takes note of it."""
        if isinstance(message, Ack):
            self._kept[message.key].pop(message.stamp, None)
            if message.refused:
                self.refused.append((message.key, message.stamp))
        elif isinstance(message, Values) and (message.view, message.clock) == (
            self._view.number,
            self._asked.get(message.key),
        ):
            del self._asked[message.key]
            self._values[message.key] = message.values, message.included

    def change(self, view: View) -> list[Send]:
        """A new view; one that is not newer changes nothing."""
        if view.number <= self._view.number:
            return []
        self._view = view
        pushes: list[Send] = [
            self._to(key, Push(view.number, key, self._rank, stamp, gradient))
            for key, kept in self._kept.items()
            for stamp, gradient in kept.items()
        ]
        return pushes + [self._to(key, Pull(view.number, key, self._rank, clock)) for key, clock in self._asked.items()]

    def _to(self, key: str, message: Message) -> Send:
        return self._view.places[key][0], message
