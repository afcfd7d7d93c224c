"""A shard: the cells that it owns, the replicas that it keeps, and whom it owes an answer. Pure: messages in and out.

A push is applied by the key's owner, sent on to the key's replicas as what the optimizer got (once for all workers of
a step, in bulk: aggregate, then replicate), and acknowledged when all of them have it (Li et al., OSDI 2014, 4.3).

In a new view (:mod:`commlib.server.membership.view`) a key's owner is one that kept it before, so it has every push
that was acknowledged; workers send it again what was not. It tells its replicas all that it knows, for they may have
what it has not. A message of an older view is dropped, one of a newer waits: an owner that was given up, and does not
know it, gets no acknowledgement from a replica, and so gives none. Nor does anybody read what may yet be lost: values,
too, go out when all replicas have what is in them.

Pushes as they come to a shard, decoded, those of one worker to one key in their order. Pure.

A message may have a signature in place of keys that this shard has never seen (another one did, which died): then it
and those after it wait until the worker has told them.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from commlib.codecs.filter import Content, MissingKeys
from commlib.errors import CommlibError, ProtocolError
from commlib.server.membership.view import View
from commlib.server.protocol.delta_coding import DeltaCoding
from commlib.server.protocol.messages import (
    Ack,
    Adopt,
    Applied,
    Keys,
    Message,
    Observe,
    Pull,
    Push,
    Replicate,
    Replicated,
    Send,
    Start,
    Unknown,
    Values,
)
from commlib.server.protocol.value_coding import ValueCoding, ValueDecoder
from commlib.server.shard.chunk_state import ChunkState
from commlib.server.storage.snapshot_policy import SnapshotPolicy


class Inbox:
    """Inbox of one shard: pushes in the order of each worker and key.

    Args:
        coding: of the job.
    """

    def __init__(self, coding: ValueCoding) -> None:
        self._coding = coding
        self._receivers: dict[tuple[str, int], ValueDecoder] = {}
        self._waiting: dict[tuple[str, int], list[Push]] = {}

    def take(self, push: Push) -> tuple[list[Push], list[Send]]:
        """Pushes that are ready now, and what is to be asked of workers.

        Raises:
            ProtocolError: it is no gradient.
        """
        waiting = self._waiting.get((push.key, push.worker))
        if waiting is not None:
            if all(p.stamp != push.stamp for p in waiting):
                waiting.append(push)
            return [], []
        return self._ready([push])

    def learn(self, keys: Keys) -> tuple[list[Push], list[Send]]:
        """The same, when keys have come.

        Raises:
            ProtocolError: nobody asked for them, or they are others.
        """
        waiting = self._waiting.pop((keys.key, keys.worker), [])
        if not waiting:  # in a view before, and then it did not matter any more
            return [], []
        self._receiver(waiting[0]).learn(keys.signature, keys.keys)
        return self._ready(waiting)

    def change(self, owned: Collection[str]) -> None:
        """Drop another owner's keys; in a new view workers send again what waits."""
        self._waiting.clear()
        self._receivers = {at: r for at, r in self._receivers.items() if at[0] in owned}

    def _ready(self, pushes: list[Push]) -> tuple[list[Push], list[Send]]:
        ready = []
        for i, push in enumerate(pushes):
            try:
                ready.append(self._decoded(push))
            except MissingKeys as e:
                self._waiting[push.key, push.worker] = pushes[i:]
                return ready, [(push.worker, Unknown(push.view, push.key, push.worker, e.signature))]
        return ready, []

    def _decoded(self, push: Push) -> Push:
        if push.gradient is None:
            return push
        return dataclasses.replace(push, gradient=self._receiver(push).decode(push.gradient, push.stamp))

    def _receiver(self, push: Push) -> ValueDecoder:
        at = push.key, push.worker
        if at not in self._receivers:
            self._receivers[at] = self._coding.receiver(*at)
        return self._receivers[at]


@dataclasses.dataclass
class _Owed:
    """Answers that wait until all replicas have so many updates."""

    number: int
    sends: list[Send]


class Shard:
    """Server of the keys that it owns, as a state machine: messages in, messages out.

    Args:
        name: its.
        view: the first.
        cell: makes a key's, as it is before any push.
        started: its values are what they are to begin with; else somebody will say.
        keeper: is told of every update of what it owns, for snapshots.
        coding: how gradients and values travel.
        lag: seconds after which a push is refused, since its worker was sent the values that it was made with; None:
            never. In a new view nobody knows that, and the first is taken.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        view: View,
        cell: Callable[[str], ChunkState],
        *,
        started: bool = True,
        keeper: SnapshotPolicy | None = None,
        coding: ValueCoding | None = None,
        lag: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._make, self._keeper = name, cell, keeper
        self.view = view
        """The newest that it has."""
        self._cells = {key: cell(key) for key, at in view.places.items() if name in at}
        self._whole = set(self._cells if started else ())  # not those that are yet to be adopted, or to start
        self._early: list[Message] = []
        self._coding = coding or ValueCoding()
        self._inbox = Inbox(self._coding)
        self._copies: dict[str, DeltaCoding] = {}  # of workers
        self._lag, self._now = lag, clock
        self._told: dict[tuple[str, int], float] = {}  # (key, worker) → when it was sent values
        self._owed: dict[str, collections.deque[_Owed]] = collections.defaultdict(collections.deque)
        # replica → updates it has
        self._have = {key: dict.fromkeys(at[1:], 0 if started else -1) for key, at in view.places.items()}
        self._pulls: dict[str, dict[int, Pull]] = collections.defaultdict(dict)  # key → worker → question

    @property
    def cells(self) -> Mapping[str, ChunkState]:
        """States of chunks by key: those that the shard owns, and its replicas."""
        return self._cells

    @property
    def whole(self) -> frozenset[str]:
        """The keys that it could own in the next view."""
        return frozenset(self._whole)

    @property
    def too_old(self) -> str:
        """Words for people: what else than not being finite a push is refused for."""
        return f", or older than {self._lag:g} s" if self._lag is not None else ""

    @property
    def clock(self) -> int:
        """The highest that any worker has had: a new one may begin there, and has pushed nothing of it yet."""
        return max((cell.furthest for cell in self._cells.values()), default=0)

    @property
    def clocks(self) -> dict[int, int]:
        """Worker → its pushes that are in all that this shard owns."""
        cells = [cell for key, cell in self._cells.items() if self.owns(key)]
        return {w: min((c.included[w] for c in cells if w in c.included), default=0) for w in self.view.workers}

    @property
    def due(self) -> tuple[int, dict[str, dict[str, Any]]] | None:
        """State to be saved now (:meth:`~commlib.server.storage.snapshot_policy.SnapshotPolicy.due`)."""
        return self._keeper.due([key for key in self._cells if self.owns(key)]) if self._keeper else None

    def owns(self, key: str) -> bool:
        """Whether it is a key's owner."""
        return self.view.places.get(key, ("",))[0] == self.name

    def handle(self, message: Message) -> list[Send]:
        """Take a message; returns the messages to be sent, in this order.

        Raises:
            ProtocolError: it cannot be right; what is wrong.
        """
        if message.view > self.view.number + 1:  # nobody has it before all shards have the one between
            raise ProtocolError(f"a message of view {message.view}, at a shard that has view {self.view.number}")
        if message.view > self.view.number:
            self._early.append(message)
        elif message.view == self.view.number:
            if isinstance(message, Start) and self.owns(message.key):
                return self._start(message)
            if isinstance(message, Push) and self.owns(message.key):
                return self._take(message)
            if isinstance(message, Keys) and self.owns(message.key):
                return self._pushes(message.key, *self._inbox.learn(message))
            if isinstance(message, Pull) and self.owns(message.key):
                return self._pull(message)
            if isinstance(message, Replicated) and self.owns(message.key):
                return self._replicated(message)
            if isinstance(message, Observe):
                return self._observe(message.metric)
            if isinstance(message, Replicate | Adopt) and message.key in self._cells:
                return self._follow(message)
        return []

    def change(self, view: View) -> list[Send]:
        """A new view; one that is not newer changes nothing.

        Raises:
            CommlibError: it shall own a key that it does not have.
        """
        if view.number <= self.view.number:
            return []
        kept = {key: at for key, at in view.places.items() if self.name in at}
        lacking = [key for key, at in kept.items() if at[0] == self.name and key not in self._whole]
        if lacking:
            raise CommlibError(f"shard {self.name} shall own {lacking[0]} in view {view.number}, and does not have it")
        self.view = view
        self._whole &= kept.keys()
        self._cells = {key: self._cells[key] if key in self._whole else self._make(key) for key in kept}
        self._pulls.clear()
        self._copies.clear()
        self._told.clear()
        self._inbox.change({key for key, at in kept.items() if at[0] == self.name})
        self._have = {key: dict.fromkeys(at[1:], -1) for key, at in kept.items() if at[0] == self.name}
        for key, owed in list(self._owed.items()):
            acks = [_Owed(o.number, [s for s in o.sends if isinstance(s[1], Ack)]) for o in owed]
            self._owed[key] = collections.deque(acks if key in self._have else [])  # workers ask anew
        sends = [send for key in self._have for send in self._begin(key)]
        early, self._early = self._early, []
        return sends + [send for message in early for send in self.handle(message)]

    # -- as an owner ----------------------------------------------------------------------------

    def _begin(self, key: str) -> list[Send]:
        """As the owner in a new view."""
        cell = self._cells[key]
        gone = sorted(cell.included.keys() - self.view.workers.keys())
        told = [send for worker in gone for send in self._owe(key, cell.leave(worker))]
        for worker, clock in self.view.workers.items():
            if cell.included.get(worker, -1) < clock:  # it came; or came back, and this replica never knew it gone
                told += self._owe(key, cell.join(worker, clock))
        state = cell.state_dict()
        return [*told, *[(r, Adopt(self.view.number, key, state)) for r in self._have[key]], *self._settled(key)]

    def _start(self, start: Start) -> list[Send]:
        if start.key in self._whole:  # once more
            return []
        self._cells[start.key].start(start.values)
        self._whole.add(start.key)
        answers = self._answers(start.key)
        return [*self._begin(start.key), *answers]

    def _observe(self, metric: float) -> list[Send]:
        for cell in self._cells.values():
            cell.observe(metric)
        return [send for key in self._cells for send in self._answers(key)]

    def _take(self, push: Push) -> list[Send]:
        cell = self._cells[push.key]
        if push.key not in self._whole:
            raise ProtocolError(f"worker {push.worker} pushes to {push.key}, which has no values yet")
        if push.stamp < cell.included.get(push.worker, 0):  # once more: whoever sent it had no answer
            ack = Ack(self.view.number, push.key, push.worker, push.stamp)
            return self._once_replicated(push.key, cell.number, [(push.worker, ack)])
        return self._pushes(push.key, *self._inbox.take(push))

    def _pushes(self, key: str, ready: list[Push], asks: list[Send]) -> list[Send]:
        return [*asks, *(send for push in ready for send in self._push(push))]

    def _push(self, push: Push) -> list[Send]:
        cell, gradient = self._cells[push.key], push.gradient
        assert not isinstance(gradient, Content)  # the inbox has decoded it
        late = self._lag is not None and self._now() - self._told.get((push.key, push.worker), self._now()) > self._lag
        applied = cell.push(push.worker, push.stamp, gradient, push.options, push.absent, refuse=late)
        sends = self._owe(push.key, applied)
        for each in applied:
            sends += [(replica, Replicate(self.view.number, push.key, each)) for replica in self._have[push.key]]
        if applied:
            sends += self._answers(push.key)
        return [*sends, *self._settled(push.key)]

    def _owe(self, key: str, applied: list[Applied]) -> list[Send]:
        """Notes whom a key's updates are to be acknowledged to; what else is to be sent of them."""
        if applied and self._keeper is not None:
            self._keeper.note(key, self._cells[key])
        for each in applied:
            for worker, stamp in each.stamps.items():
                ack = Ack(self.view.number, key, worker, stamp, worker in each.refused)
                self._owed[key].append(_Owed(each.number + 1, [(worker, ack)]))
        return []

    def _replicated(self, message: Replicated) -> list[Send]:
        if (have := self._have[message.key].get(message.shard)) is not None:
            self._have[message.key][message.shard] = max(have, message.number)
        return self._settled(message.key)

    def _once_replicated(self, key: str, number: int, sends: list[Send]) -> list[Send]:
        self._owed[key].append(_Owed(number, sends))
        return self._settled(key)

    def _settled(self, key: str) -> list[Send]:
        owed, sends = self._owed[key], list[Send]()
        while owed and all(n >= owed[0].number for n in self._have[key].values()):
            sends += owed.popleft().sends
        return sends

    def _pull(self, pull: Pull) -> list[Send]:
        self._pulls[pull.key][pull.worker] = pull
        return self._answers(pull.key)

    def _answers(self, key: str) -> list[Send]:
        """Answers to all who may read now."""
        cell, pulls = self._cells[key], self._pulls[key]
        may = [p for p in pulls.values() if key in self._whole and self._may_read(p)]
        if not may:
            return []
        own, included = cell.values.clone(), dict(cell.included)  # what it is now, whenever it leaves
        if key not in self._copies:
            self._copies[key] = DeltaCoding(*self._coding.of_values(key))
        sends: list[Send] = []
        for p in may:
            del pulls[p.worker]
            self._told[key, p.worker] = self._now()
            row, serial = self._copies[key].answer(p.worker, p.have, own, self._version(key))
            answer = Values(self.view.number, key, p.worker, p.clock, row, included, p.within, p.have, serial)
            sends.append((p.worker, answer))
        return self._once_replicated(key, cell.number, sends)

    def _may_read(self, pull: Pull) -> bool:
        return self._cells[pull.key].read(pull.worker, pull.clock, pull.within) is not None

    def _version(self, key: str) -> int:
        return self._cells[key].number  # another, if its values are others

    # -- as a replica ---------------------------------------------------------------------------

    def _follow(self, message: Replicate | Adopt) -> list[Send]:
        cell = self._cells[message.key]
        if isinstance(message, Adopt):
            cell.load_state_dict(message.state)
            self._whole.add(message.key)
        else:
            cell.follow(message.applied)
        answer = Replicated(message.view, message.key, cell.number, self.name)
        return [(self.view.places[message.key][0], answer)]
