"""A shard of a group that keeps the same values as other groups of shards. Pure: messages in and out.

A key's group is its end (``w[0:9]@1``). Of the groups' copies one is the master and the others follow it
(:mod:`commlib.server.shard.group_sync`); masters are spread over the groups. A follower that has been updated tells the
master how far it has gone, and takes what that then has. Who reads with ``within`` reads what all groups have reached.

Ordering: between two shards messages keep their order, so a master has a follower's in the follower's. In a new view
what was under way is dropped; followers send again what has no answer, and the master adds each once. A follower may
have begun before its master has: what comes to it until then waits.
"""

from __future__ import annotations

import collections
from typing import Any

from commlib.errors import ProtocolError
from commlib.server.job.chunks import group_of, in_group
from commlib.server.job.worker_groups import Topology
from commlib.server.membership.view import View
from commlib.server.protocol.messages import Agreed, Applied, Message, Moved, Pull, Send, Start
from commlib.server.shard.group_sync import Delta, Follower, Master
from commlib.server.shard.shard import Shard


class GroupedShard(Shard):
    """Shard of one of several groups; arguments as :class:`~commlib.server.shard.shard.Shard`'s, but these.

    Args:
        topology: whose groups they are.
    """

    def __init__(self, *args: Any, topology: Topology, **options: Any) -> None:
        super().__init__(*args, **options)
        self._topology = topology
        self._masters: dict[str, Master] = {}
        self._followers: dict[str, Follower] = {}
        self._heard: collections.Counter[str] = collections.Counter()  # key → times that another group changed it
        self._before: dict[str, list[Moved]] = collections.defaultdict(list)  # that came before the master had begun
        bases = sorted({_base(key) for key in self.view.places})
        self._master_of = {base: i % topology.server_groups for i, base in enumerate(bases)}

    def handle(self, message: Message) -> list[Send]:
        if message.view != self.view.number or not isinstance(message, Moved | Agreed):
            return super().handle(message)
        self._check(message)
        return self._moved(message) if isinstance(message, Moved) else self._agreed(message)

    def change(self, view: View) -> list[Send]:
        if view.number <= self.view.number:
            return []
        self._before.clear()
        for master in self._masters.values():  # before anything of the new view is taken
            master.keep(self._training(view))
        sends = [send for send in super().change(view) if not isinstance(send[1], Moved)]  # they are among the pending
        again = [(key, delta) for key, follower in self._followers.items() for delta in follower.pending]
        told = [self._to_master(key, delta) for key, delta in again]
        return [*sends, *told, *(send for key in self._masters for send in self._reached(key))]

    def _training(self, view: View) -> set[int]:
        """Server groups whose workers are in a view."""
        return {self._topology.server_group(worker) for worker in view.workers}

    def _clock(self, key: str) -> int:
        """Updates of all workers of this group that are in a key's values."""
        return min(self.cells[key].included.values(), default=0)

    # -- what becomes of a shard's own messages ---------------------------------------------------

    def _start(self, message: Start) -> list[Send]:
        sends, key = super()._start(message), message.key
        values = self.cells[key].values
        if self._master_of[_base(key)] != group_of(key):
            self._followers.setdefault(key, Follower(values, self._topology.every))
        elif key not in self._masters:
            self._masters[key] = Master(values, self._training(self.view))
        return [*sends, *(send for moved in self._before.pop(key, []) for send in self._moved(moved))]

    def _owe(self, key: str, applied: list[Applied]) -> list[Send]:
        sends = super()._owe(key, applied)
        if key in self._followers:
            told = [self._followers[key].updated(self._clock(key)) for _ in applied]
            return [*sends, *(self._to_master(key, delta) for delta in told if delta is not None)]
        return [*sends, *self._reached(key)]

    def _pull(self, pull: Pull) -> list[Send]:
        return [*super()._pull(pull), *self._meet(pull.key)]

    def _may_read(self, pull: Pull) -> bool:
        own = super()._may_read(pull)
        if pull.within is None:
            return own
        wanted = pull.clock - pull.within
        both = (self._followers.get(pull.key), self._masters.get(pull.key))
        return own and all(one is None or one.met(wanted) for one in both)

    def _version(self, key: str) -> int:
        return super()._version(key) + self._heard[key]

    # -- between groups -------------------------------------------------------------------------

    def _check(self, message: Moved | Agreed) -> None:
        key, cell, values = message.key, self.cells.get(message.key), message.values
        if cell is None or (isinstance(message, Agreed) and key not in self._followers):
            raise ProtocolError(f"a {type(message).__name__} for {key}, which is not for shard {self.name}")
        if values.shape != cell.values.shape or values.dtype != cell.values.dtype:
            raise ProtocolError(f"a {type(message).__name__} of {values.dtype}, {tuple(values.shape)}, for {key}")

    def _moved(self, message: Moved) -> list[Send]:
        key = message.key
        if key not in self._masters:
            self._before[key].append(message)
            return []
        delta = Delta(message.serial, message.values, message.clock, message.wait)
        self._masters[key].take(message.group, delta)
        self._heard[key] += 1
        return self._reached(key)

    def _reached(self, key: str) -> list[Send]:
        """A master's values have changed, or who trains: who is answered now."""
        master = self._masters.get(key)
        if master is None:
            return []
        master.reach(group_of(key), self._clock(key))
        sends = []
        for group, serial, have in master.answers():
            to = _base(key) + in_group(group)
            agreed = Agreed(self.view.number, to, serial, have, self.cells[key].values.clone())
            sends.append((self.view.places[to][0], agreed))
        return [*sends, *self._answers(key)]

    def _agreed(self, message: Agreed) -> list[Send]:
        key = message.key
        self._followers[key].answer(message.serial, message.have, message.values)
        self._heard[key] += 1
        delta = self._followers[key].due(self._clock(key))
        sends = [self._to_master(key, delta)] if delta is not None else []
        return [*self._answers(key), *sends, *self._meet(key)]

    def _meet(self, key: str) -> list[Send]:
        """Asks the master for what readers of a follower wait for, once their own group has come so far."""
        follower, told = self._followers.get(key), list[Delta | None]()
        if follower is not None:
            for pull in self._pulls[key].values():
                if pull.within is not None and super()._may_read(pull):
                    told.append(follower.meet(pull.clock - pull.within))
        return [self._to_master(key, delta) for delta in told if delta is not None]

    def _to_master(self, key: str, delta: Delta) -> Send:
        base = _base(key)
        to = base + in_group(self._master_of[base])
        told = (delta.serial, delta.values, delta.clock, delta.wait)
        return self.view.places[to][0], Moved(self.view.number, to, group_of(key), *told)


def _base(key: str) -> str:
    return key.rpartition("@")[0]
