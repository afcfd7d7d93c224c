"""A worker's side: what it has pushed, what of it is acknowledged, and what it waits for. Pure: messages in and out.

A push is kept until it is acknowledged, and sent again to whoever owns its key in a new view; so are questions. What
came before counts once (:class:`~commlib.server.job.version_ledger.VersionLedger`), so it does no harm that it comes
again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from commlib.errors import ProtocolError
from commlib.server.membership.view import View
from commlib.server.protocol.delta_coding import DeltaCopy
from commlib.server.protocol.messages import Ack, Keys, Message, Observe, Pull, Push, Send, Start, Unknown, Values
from commlib.server.protocol.value_coding import ValueCoding, ValueEncoder


class ClientState:
    """State of one worker's client.

    Args:
        rank: its.
        view: one with this worker in it.
        coding: how gradients and values travel.
    """

    def __init__(self, rank: int, view: View, coding: ValueCoding | None = None) -> None:
        self._rank, self._view = rank, view
        self._coding = coding or ValueCoding()
        self._senders: dict[str, ValueEncoder] = {}
        self._copies: dict[str, DeltaCopy] = {}
        self._due = dict.fromkeys(view.places, view.workers[rank])  # key → stamp of the next push
        self._kept: dict[str, dict[int, Push]] = collections.defaultdict(dict)  # key → stamp → push
        self._asked: dict[str, Pull] = {}
        self._values: dict[str, tuple[Tensor, Mapping[int, int]]] = {}
        self.refused: list[tuple[str, int]] = []
        """(key, stamp) of pushes that were not finite."""
        self.last_included: Mapping[int, int] = {}
        """Worker → its pushes, of the last values that came."""

    @property
    def unacknowledged(self) -> int:
        """Number of pushes that no shard has acknowledged yet."""
        return sum(map(len, self._kept.values()))

    @property
    def furthest(self) -> int:
        """Clock of the key that this worker has pushed most often."""
        return max(self._due.values(), default=0)

    def clock(self, key: str) -> int:
        """How often it has pushed a key; and before it came, others."""
        return self._due[key]

    def owner(self, key: str) -> str:
        """The shard that has it."""
        return self._view.places[key][0]

    def start(self, key: str, values: Tensor) -> list[Send]:
        """Says what values, (n,), a key starts with; the first worker does, in the first view."""
        return [self._to(key, Start(self._view.number, key, values))]

    def push(
        self,
        key: str,
        gradient: Tensor | None,
        options: Mapping[str, Any] | None = None,
        absent: frozenset[int] = frozenset(),
    ) -> list[Send]:
        """Sends a gradient, (n,), which must stay as it is until it is acknowledged; or None.

        Args:
            key: whose.
            gradient: this one.
            options: of the optimizer, where they are others than it was made with.
            absent: parameters in it, by their place, that have no gradient while others have.
        """
        stamp = self.clock(key)
        coded = None if gradient is None else self._sender(key).encode(gradient, stamp)
        self._due[key] = stamp + 1
        push = Push(self._view.number, key, self._rank, stamp, coded, options or {}, absent)
        self._kept[key][stamp] = push
        return [self._to(key, push)]

    def pull(self, key: str, within: int | None = None, *, exact: bool = False) -> list[Send]:
        """Asks for values that are new enough for its clock of this key; or for newer ones yet (``within``).

        ``exact``: as the shard has them, whatever the coding.
        """
        self._values.pop(key, None)
        have = None if exact else self._copy(key).have
        self._asked[key] = pull = Pull(self._view.number, key, self._rank, self.clock(key), within, have)
        return [self._to(key, pull)]

    def observe(self, metric: float) -> list[Send]:
        """Tells all shards what an evaluation gave."""
        shards = {at[0] for at in self._view.places.values()} | {s for at in self._view.places.values() for s in at[1:]}
        return [(shard, Observe(self._view.number, self._rank, float(metric))) for shard in sorted(shards)]

    def values(self, key: str) -> tuple[Tensor, Mapping[int, int]] | None:
        """Values that answered the last question, and whose pushes are in them; None as long as none have."""
        return self._values.get(key)

    def handle(self, message: Message) -> list[Send]:
        """Takes note of it; what is to be sent.

        Raises:
            ProtocolError: it cannot be right; what is wrong.
        """
        if isinstance(message, Ack):
            self._kept[message.key].pop(message.stamp, None)
            if message.refused:
                self.refused.append((message.key, message.stamp))
        elif isinstance(message, Values):
            asked = self._asked.get(message.key)
            question = (message.view, message.clock, message.within, message.have)
            if asked is not None and question == (asked.view, asked.clock, asked.within, asked.have):
                del self._asked[message.key]
                values = self._copy(message.key).take(message.values, message.serial)
                self._sender(message.key).see(values)
                self._values[message.key] = values, message.included
                self.last_included = message.included
        elif isinstance(message, Unknown) and message.view == self._view.number:
            keys = self._sender(message.key).keys_of(message.signature)
            if keys is None:
                raise ProtocolError(
                    f"a shard asks for keys of {message.key} that are forgotten here: give key_cache more entries"
                )
            return [self._to(message.key, Keys(message.view, message.key, self._rank, message.signature, keys))]
        return []

    def change(self, view: View) -> list[Send]:
        """A new view; one that is not newer changes nothing."""
        if view.number <= self._view.number:
            return []
        self._view = view
        for kept in self._kept.values():
            kept.update({stamp: dataclasses.replace(push, view=view.number) for stamp, push in kept.items()})
        self._asked = {key: dataclasses.replace(pull, view=view.number) for key, pull in self._asked.items()}
        again: list[Push | Pull] = [*(p for kept in self._kept.values() for p in kept.values()), *self._asked.values()]
        return [self._to(message.key, message) for message in again]

    def _sender(self, key: str) -> ValueEncoder:
        if key not in self._senders:
            self._senders[key] = self._coding.sender(key, self._rank)
        return self._senders[key]

    def _copy(self, key: str) -> DeltaCopy:
        if key not in self._copies:
            self._copies[key] = DeltaCopy(*self._coding.of_values(key))
        return self._copies[key]

    def _to(self, key: str, message: Message) -> Send:
        return self.owner(key), message
