"""Groups of shards over a network that delivers in any order between pairs, while workers go and views change.

Group g's updates add whole numbers at place g of the row: so what is to be equal is so to the last bit, and a missing
update, or one that counts twice, shows.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.errors import ProtocolError
from commlib.server.job.chunks import group_of
from commlib.server.job.worker_groups import Topology
from commlib.server.membership.hash_ring import HashRing
from commlib.server.membership.view import View, first
from commlib.server.protocol.messages import Agreed, Moved, Send
from commlib.server.shard.chunk_state import ChunkState
from commlib.server.shard.grouped_shard import GroupedShard
from commlib.server.worker.client_state import ClientState
from tests.support.tiers import examples

BASES = ("v[0:4]", "w[0:4]")
SHAPE = 4
START = 100.0


@dataclasses.dataclass
class Worker:
    """Pushes all keys of its group so many times, each time once it has the values; then reads what all have done."""

    client: ClientState
    group: int
    keys: list[str]
    steps: int
    done: int = 0
    syncing: bool = False

    def act(self) -> list[Send]:
        if any(self.client.values(key) is None for key in self.keys):
            return []
        if self.done < self.steps:
            self.done += 1
            gradient = torch.zeros(SHAPE, dtype=torch.float64)
            gradient[self.group] = -float(self.done)
            pushes = [send for key in self.keys for send in self.client.push(key, gradient)]
            return [*pushes, *self.read(None)]
        if not self.syncing:
            self.syncing = True
            return self.read(0)
        return []

    def read(self, within: int | None) -> list[Send]:
        return [send for key in self.keys for send in self.client.pull(key, within)]

    @property
    def finished(self) -> bool:
        return self.syncing and all(self.client.values(key) is not None for key in self.keys)


class Network:
    """Everybody, and what is under way between any two."""

    def __init__(self, topology: Topology, steps: int, drawn: random.Random) -> None:
        self.topology, self.drawn = topology, drawn
        keys = {f"{base}@{g}": SHAPE * 8 for base in BASES for g in range(topology.server_groups)}
        workers = range(topology.groups * topology.workers)
        self.view = first(HashRing((f"s{i}" for i in range(topology.shards)), topology.server_groups), workers, keys)
        self.shards = {f"s{i}": self._shard(f"s{i}") for i in range(topology.shards)}
        self.workers = {w: self._worker(w, steps, keys) for w in workers}
        self.wires: dict[Any, collections.deque[Any]] = collections.defaultdict(collections.deque)
        self.updates = torch.zeros(SHAPE, dtype=torch.float64)
        for key in keys:
            self.send(0, self.workers[0].client.start(key, torch.full((SHAPE,), START, dtype=torch.float64)))
        for w, worker in self.workers.items():
            self.send(w, worker.read(None))

    def _shard(self, name: str) -> GroupedShard:
        def cell(key: str) -> ChunkState:
            return ChunkState(
                torch.zeros(SHAPE, dtype=torch.float64),
                lambda p: torch.optim.SGD(p, lr=1.0),
                self.view.workers,
                self.topology.threshold(),
                group=self.topology.group,
                takes=lambda worker: self.topology.server_group(worker) == group_of(key),
            )

        return GroupedShard(name, self.view, cell, topology=self.topology, started=False)

    def _worker(self, w: int, steps: int, keys: dict[str, int]) -> Worker:
        own = [key for key in keys if group_of(key) == self.topology.server_group(w)]
        return Worker(ClientState(w, self.view), self.topology.group(w), own, steps)

    def send(self, source: Any, sends: list[Send]) -> None:
        for to, message in sends:
            self.wires[source, to].append(message)

    def step(self) -> None:
        waiting = [pair for pair, wire in self.wires.items() if wire]
        if waiting and (self.drawn.random() < 0.8 or not self.workers):
            source, to = self.drawn.choice(waiting)
            message, node = self.wires[source, to].popleft(), self._node(to)
            if node is not None:
                self.send(to, node.change(message) if isinstance(message, View) else node.handle(message))
        else:
            w = self.drawn.choice(sorted(self.workers))
            self.send(w, self.workers[w].act())

    def _node(self, to: Any) -> Any:
        if isinstance(to, str):
            return self.shards[to]
        return self.workers[to].client if to in self.workers else None

    def leave(self, workers: list[int]) -> None:
        """They are gone: once all shards have the view before, all are told of the next."""
        while any(shard.whole != shard.cells.keys() for shard in self.shards.values()):
            self.step()  # there is no other view before values have begun
        for name, shard in self.shards.items():
            while wire := self.wires["views", name]:
                self.send(name, shard.change(wire.popleft()))
        for w in workers:
            del self.workers[w]
        here = {w: clock for w, clock in self.view.workers.items() if w not in workers}
        self.view = View(self.view.number + 1, self.view.places, here)
        for to in (*self.shards, *self.workers):
            self.wires["views", to].append(self.view)

    def run(self) -> None:
        for _ in range(100_000):
            if all(worker.finished for worker in self.workers.values()):
                return
            self.step()
        raise AssertionError("they wait for each other")

    def drain(self) -> None:
        while any(self.wires.values()):
            self.step()

    def values(self) -> list[list[float]]:
        """All keys' of all groups, which are the same row of numbers in the end."""
        return [cell.values.tolist() for shard in self.shards.values() for cell in shard.cells.values()]


topologies = st.sampled_from(
    [Topology(2, 1, 2, 1), Topology(3, 1, 3, 1), Topology(4, 1, 2, 2), Topology(3, 2, 2, 1), Topology(2, 2, 2, 1, 3)]
)


@settings(max_examples=examples(40))
@given(st.integers(0, 2**31), topologies, st.integers(1, 6), st.booleans())
def test_in_the_end_every_group_has_every_update_once(seed: int, topology: Topology, steps: int, views: bool) -> None:
    drawn = random.Random(seed)
    net = Network(topology, steps, drawn)
    for _ in range(3 if views else 0):
        for _ in range(drawn.randrange(200)):
            net.step()
        net.leave([])  # the same members, another view: all that was under way is dropped
    net.run()
    total = sum(range(1, steps + 1))
    wanted = [START + (total if g < topology.groups else 0) for g in range(SHAPE)]
    for worker in net.workers.values():
        for key in worker.keys:
            found = worker.client.values(key)
            assert found is not None
            assert found[0].tolist() == wanted
    net.drain()
    assert net.values() == [wanted] * len(net.values())


@settings(max_examples=examples(25))
@given(st.integers(0, 2**31), topologies)
def test_whoever_goes_is_not_waited_for_and_the_others_end_with_the_same(seed: int, topology: Topology) -> None:
    drawn = random.Random(seed)
    net = Network(topology, 5, drawn)
    for _ in range(drawn.randrange(100, 400)):
        net.step()
    last = max(net.workers)
    group = [w for w in net.workers if topology.group(w) == topology.group(last)]
    net.leave(drawn.choice([[last], group]))
    net.run()
    found = [tuple(f[0].tolist()) for w in net.workers.values() for k in w.keys if (f := w.client.values(k))]
    gone = topology.groups - 1  # what that group had pushed of each key may differ from key to key
    kept = [(*row[:gone], *row[gone + 1 :]) for row in found]
    assert len(set(kept)) == 1
    assert kept[0][:gone] == tuple([START + 15.0] * gone)


def test_a_message_between_groups_that_cannot_be_right_is_refused() -> None:
    net = Network(Topology(2, 1, 2, 1), 1, random.Random(0))
    net.run()
    shard = next(s for s in net.shards.values() if any(k.endswith("@1") for k in s.cells))
    key = next(iter(shard.cells))
    row = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ProtocolError, match="a Moved of"):
        shard.handle(Moved(0, key, 0, 9, row, 1))
    with pytest.raises(ProtocolError, match="not for shard"):
        shard.handle(Moved(0, "x[0:4]@1", 0, 9, row, 1))
    followed = {k for k in shard.cells if k in shard._followers}
    for mastered in shard.cells.keys() - followed:
        with pytest.raises(ProtocolError, match="not for shard"):
            shard.handle(Agreed(0, mastered, 0, 0, torch.zeros(SHAPE, dtype=torch.float64)))
