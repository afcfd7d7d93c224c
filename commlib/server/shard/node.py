"""A shard behind an endpoint. Thin: what decides is in shard.py.

Ordering: a shard is touched by its node's thread only, which others ask by :meth:`ShardNode.call`, and its messages
leave in the order in which it gave them: what a peer has no room for waits in its own row, and nobody else's. So a slow
worker holds up itself, not the shard. All members of a view are connected before the shard acts in it.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from commlib.errors import CommlibError, PeerLost, ProtocolError
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.frame import Buffer, Frame
from commlib.server.membership.registry import SHARD, WORKER, Epoch, ShardReport
from commlib.server.membership.view import View
from commlib.server.protocol.message_loop import SLICE_S, MessageLoop
from commlib.server.protocol.messages import Ack, Complaint, Keys, Message, Observe, Pull, Push, Replicated, Send, Start
from commlib.server.protocol.wire import unpack
from commlib.server.shard.shard import Shard

_log = logging.getLogger("commlib")
T = TypeVar("T")


class ShardNode(MessageLoop):
    """Serves from :meth:`start` to :meth:`stop`.

    Args:
        endpoint: connected to all members; its owner closes it, afterwards.
        shard: what it serves.
        ranks: shard → its endpoint's rank. Workers' endpoints have their own ranks.
        seconds: that anything waits for it.
        urgency: of keys (:class:`~commlib.server.protocol.send_queue.SendQueue`).
    """

    def __init__(
        self,
        endpoint: Endpoint,
        shard: Shard,
        ranks: Mapping[str, int],
        seconds: float = 60.0,
        urgency: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(endpoint, f"shard {shard.name}", urgency)
        self._shard, self._seconds = shard, seconds
        self._ranks = dict(ranks)
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._error: CommlibError | None = None

    def call(self, function: Callable[[Shard], T]) -> T:
        """Call a function of the shard in the thread that may touch it; returns its result.

        Raises:
            CommlibError: the shard has ended, or does not come to it in time; and whatever the function raises.
        """
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def ask() -> None:
            try:
                answer.set_result(function(self._shard))
            except BaseException as e:
                answer.set_exception(e)

        self._asked.put(ask)
        end = time.monotonic() + self._seconds
        while not answer.done() and self._error is None and time.monotonic() < end:
            concurrent.futures.wait([answer], timeout=SLICE_S)
        if answer.done():
            return answer.result()
        why = self._error or f"it is busy for {self._seconds:g} s"
        raise CommlibError(f"shard {self._shard.name} does not answer: {why}")

    @property
    def error(self) -> CommlibError | None:
        """Why it serves no more, if it has ended by itself."""
        return self._error

    def connect(self, epoch: Epoch) -> None:
        """Opens the ways to all members."""
        for member in epoch.members.values():
            if member.id != self._endpoint.rank and not self._endpoint.reaches(member.id):
                self._endpoint.connect(member.id, member.address, key=member.key)

    def change(self, epoch: Epoch) -> None:
        """A new view.

        Raises:
            CommlibError: as :meth:`call`.
        """
        self.connect(epoch)
        self.call(lambda shard: self._change(shard, epoch.view, {m.name: i for i, m in epoch.of(SHARD).items()}))

    def report(self, number: int) -> ShardReport | None:
        """Keys and clock of the shard, if it has the view of this number."""
        return self.call(lambda s: ShardReport(s.whole, s.clock) if s.view.number == number else None)

    def status(self) -> dict[str, Any]:
        """How it is doing, for people."""
        return self.call(
            lambda s: {
                "owns": sum(s.owns(key) for key in s.cells),
                "copies": sum(not s.owns(key) for key in s.cells),
                "clocks": s.clocks,
                "sent": self.sent,
                "received": self.received,
            }
        )

    def _change(self, shard: Shard, view: View, ranks: Mapping[str, int]) -> None:
        self._ranks = dict(ranks)
        self._queue.keep({*ranks.values(), *view.workers})
        self._send(shard.change(view))

    def _lost(self, error: CommlibError) -> None:
        self._error = error
        _log.error("shard %s ends: %s", self._shard.name, error)

    def _cut_off(self, error: PeerLost) -> None:
        # Of two shards the later one ends, as if it were killed: others have copies of what it keeps. A worker ends by
        # itself.
        if error.rank in self._ranks.values() and self._endpoint.rank > (error.rank or 0):
            raise error
        _log.warning("shard %s: %s", self._shard.name, error)

    def _take(self, frame: Frame) -> None:
        self._send(self._answers(frame.sender, frame.parts))

    def _turn(self) -> None:
        while not self._asked.empty():
            self._asked.get()()
        self._queue.leave()

    def _answers(self, sender: int, parts: Sequence[Buffer]) -> list[Send]:
        sends: list[Send] = []
        try:
            for message in unpack(parts):
                if message.view < self._shard.view.number:  # from before: of one that was given up, say
                    continue
                self._check(sender, message)
                sends += self._shard.handle(message)
        except ProtocolError as e:
            _log.warning("shard %s refused a message of rank %d: %s", self._shard.name, sender, e)
            sends.append((sender, Complaint(0, str(e)[:1000])))
        for _, sent in sends:
            if isinstance(sent, Ack) and sent.refused:
                what = f"push {sent.stamp} of worker {sent.worker} to {sent.key}"
                _log.warning("shard %s refused %s: it is not finite%s", self._shard.name, what, self._shard.too_old)
        return sends

    def _check(self, sender: int, message: Message) -> None:
        """Refuse a message in which a member speaks for another."""
        names = {rank: name for name, rank in self._ranks.items()}
        if isinstance(message, Push | Pull | Observe | Keys):
            if message.worker != sender:
                raise ProtocolError(f"rank {sender} speaks for {WORKER} {message.worker}")
        elif isinstance(message, Start):
            if sender != min(self._shard.view.workers, default=None):
                raise ProtocolError(f"rank {sender} says what values begin with, and that is the first worker's to say")
        elif isinstance(message, Replicated):
            if names.get(sender) != message.shard:
                raise ProtocolError(f"rank {sender} speaks for shard {message.shard}")
        elif sender not in names:
            raise ProtocolError(f"rank {sender} is no shard, and sends a {type(message).__name__}")

    def _send(self, sends: Sequence[Send]) -> None:
        named = [(self._ranks.get(to) if isinstance(to, str) else to, message) for to, message in sends]
        self.sent += self._queue.put(*((rank, message) for rank, message in named if rank is not None))
