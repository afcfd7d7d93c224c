"""Client of a worker behind an endpoint. Thin: what decides is in client_state.py.

Ordering: the client and its queue are touched under one lock, and messages are put into the queue under it, too: so
they leave in the order in which the client gave them. A thread takes what comes; no other waits for the network.
:class:`RequestTrace` records messages under way: a push until it is acknowledged, a question until its values come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from commlib.errors import CommlibError, PeerLost, ProtocolError
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.frame import Frame
from commlib.server.membership.registry import SHARD, Epoch
from commlib.server.protocol.message_loop import MessageLoop
from commlib.server.protocol.messages import Ack, Complaint, Message, Pull, Push, Send, Values
from commlib.server.protocol.wire import unpack
from commlib.server.worker.client_state import ClientState
from commlib.telemetry.trace import NONE, Trace


class RequestTrace:
    """Trace of one worker's requests; each key has a row. For one thread at a time, but a trace may begin and end
    meanwhile.

    What is sent again in a new view has left when it did so first. Of a key's questions only the last is answered.
    """

    def __init__(self) -> None:
        self._trace = NONE
        self._pushes: dict[tuple[str, int], float] = {}
        self._pulls: dict[str, tuple[tuple[int, int | None], float]] = {}

    @property
    def trace(self) -> Trace:
        """Where they are recorded; another one knows of nothing that left before it."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self._trace, self._pushes, self._pulls = trace, {}, {}

    def leave(self, sends: Sequence[Send]) -> None:
        """These messages leave."""
        if not self._trace.enabled:
            return
        now = self._trace.now()
        for _, message in sends:
            if isinstance(message, Push):
                self._pushes.setdefault((message.key, message.stamp), now)
            elif isinstance(message, Pull):
                question = message.clock, message.within
                if self._pulls.get(message.key, (None,))[0] != question:
                    self._pulls[message.key] = question, now

    def came(self, message: Message) -> None:
        """This one came."""
        if not self._trace.enabled:
            return
        if isinstance(message, Ack):
            left = self._pushes.pop((message.key, message.stamp), None)
            if left is not None:
                self._note("push", message.key, left, step=message.stamp, refused=message.refused)
        elif isinstance(message, Values):
            question, asked = self._pulls.get(message.key, (None, 0.0))
            if question == (message.clock, message.within):
                self._pulls.pop(message.key, None)
                self._note("pull", message.key, asked, step=message.clock)

    def _note(self, what: str, key: str, left: float, **details: object) -> None:
        self._trace.span(key, what, left, self._trace.now(), **details)


T = TypeVar("T")


class ClientNode(MessageLoop):
    """A worker's, from :meth:`start` to :meth:`stop`.

    Args:
        endpoint: connected to all shards; its owner closes it, afterwards.
        client: of this rank.
        ranks: shard → its endpoint's rank.
        timeout: seconds that anything waits.
        urgency: of keys (:class:`~commlib.server.protocol.send_queue.SendQueue`).
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client: ClientState,
        ranks: Mapping[str, int],
        timeout: float = 60.0,
        urgency: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(endpoint, f"worker {endpoint.rank}", urgency)
        self._client, self._timeout = client, timeout
        self._ranks = dict(ranks)
        self.flights = RequestTrace()
        """What is recorded of messages, if anything is."""
        self._news = threading.Condition()
        self._error: CommlibError | None = None

    def begin(self, key: str, values: Tensor) -> None:
        """Says what values, (n,), a key starts with; the first worker does."""
        with self._news:
            self._check()
            self._put(self._client.start(key, values))

    def push(
        self,
        key: str,
        gradient: Tensor | None,
        options: Mapping[str, Any] | None = None,
        absent: frozenset[int] = frozenset(),
        *,
        pull: bool = False,
    ) -> None:
        """Sends a gradient, (n,), which must stay as it is until it is acknowledged; or None. Waits for nothing.

        Args:
            key: whose.
            gradient: this one.
            options: of the optimizer, where they are others than it was made with.
            absent: parameters in it, by their place, that have no gradient while others have.
            pull: ask for values, too, in the same frame.

        Raises:
            CommlibError: what had gone wrong before.
        """
        with self._news:
            self._check()
            sends = self._client.push(key, gradient, options, absent)
            self._put([*sends, *self._client.pull(key)] if pull else sends)

    def pull(self, key: str, within: int | None = None, *, exact: bool = False) -> None:
        """Asks for values (:meth:`~commlib.server.worker.client_state.ClientState.pull`); waits for nothing."""
        with self._news:
            self._check()
            self._put(self._client.pull(key, within, exact=exact))

    def clock(self, key: str) -> int:
        """Pushes of a key so far; and of others, before this worker came."""
        with self._news:
            return self._client.clock(key)

    def observe(self, metric: float) -> None:
        """Tells all shards what an evaluation gave: accuracy or loss, as the rule wants it."""
        with self._news:
            self._check()
            self._put(self._client.observe(metric))

    def values(self, key: str) -> tuple[Tensor, Mapping[int, int]]:
        """Values that answer the last question, (n,), and how many pushes of each worker are in them.

        Raises:
            PeerLost: nothing in time; who is asked and who was behind are named.
            ProtocolError: a shard complains of what it got.
            CommlibError: the job is over; why.
        """
        return self._until(lambda: self._client.values(key), lambda: f"values of {key} from {self._whom(key)}")

    def flush(self) -> None:
        """Waits until all that was pushed is acknowledged.

        Raises:
            PeerLost, ProtocolError, CommlibError: as :meth:`values`.
        """
        self._until(
            lambda: not self._client.unacknowledged or None,
            lambda: f"acknowledgements of {self._client.unacknowledged} pushes, from {', '.join(self._ranks)}",
        )

    @property
    def refused(self) -> int:
        """Pushes that were not finite."""
        return len(self._client.refused)

    def status(self) -> dict[str, Any]:
        """How it is doing, for people."""
        with self._news:
            waiting = self._client.unacknowledged
            return {"clock": self._client.furthest, "waiting": waiting, "sent": self.sent, "received": self.received}

    def change(self, epoch: Epoch) -> None:
        """A new view, in which this worker is."""
        shards = epoch.of(SHARD)
        for member in shards.values():
            if not self._endpoint.reaches(member.id):
                self._endpoint.connect(member.id, member.address, key=member.key)
        with self._news:
            self._ranks = {m.name: i for i, m in shards.items()}
            self._queue.keep(shards)
            self._put(self._client.change(epoch.view))

    def fail(self, error: CommlibError) -> None:
        """All that is asked of it from now on, and what waits, raises this."""
        with self._news:
            self._error = self._error or error
            self._news.notify_all()

    def _until(self, ready: Callable[[], T | None], what: Callable[[], str]) -> T:
        end = time.monotonic() + self._timeout
        with self._news:
            while True:
                found = ready()
                if found is not None:
                    return found
                self._check()
                left = end - time.monotonic()
                if left <= 0:
                    raise PeerLost(f"worker {self._endpoint.rank} waited {self._timeout:g} s for {what()}")
                self._news.wait(left)

    def _whom(self, key: str) -> str:
        behind = self._client.last_included
        slowest = ", ".join(f"{w} at {c}" for w, c in sorted(behind.items(), key=lambda item: item[1])[:3])
        told = f"; pushes it last knew of: worker {slowest}" if slowest else ""
        return f"{self._client.owner(key)}, at its clock {self._client.clock(key)}{told}"

    def _shard_at(self, rank: int) -> str:
        return next((name for name, r in self._ranks.items() if r == rank), f"rank {rank}")

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error

    def _lost(self, error: CommlibError) -> None:
        self.fail(error)

    def _cut_off(self, error: PeerLost) -> None:
        raise error

    def _take(self, frame: Frame) -> None:
        for message in unpack(frame.parts):
            if isinstance(message, Complaint):
                raise ProtocolError(f"{self._shard_at(frame.sender)}: {message.why}")
            with self._news:
                self.flights.came(message)
                self._put(self._client.handle(message))
                self._news.notify_all()

    def _turn(self) -> None:
        with self._news:
            self._queue.leave()

    def _put(self, sends: Sequence[Send]) -> None:
        self.flights.leave(sends)
        here = [(self._ranks[to], message) for to, message in sends if isinstance(to, str) and to in self._ranks]
        self.sent += self._queue.put(*here)
