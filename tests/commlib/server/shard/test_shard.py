"""Shards and workers over a network that delivers in any order between pairs, with deaths, newcomers and the undead.

Worker w's t-th push of a key adds 4^t to value w: its digits to base 4 say which pushes were applied, and how often.
"""

from __future__ import annotations

import collections
import copy
import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commlib.errors import CommlibError, PeerLost, ProtocolError
from commlib.runtime.layers import LayerSpec
from commlib.server.job.consistency import BSP, Consistency, make
from commlib.server.membership.hash_ring import HashRing
from commlib.server.membership.view import View, first, following
from commlib.server.protocol.messages import Ack, Adopt, Message, Pull, Push, Replicate, Send, Unknown, Values
from commlib.server.protocol.value_coding import ValueCoding, way, way_of_values
from commlib.server.shard.chunk_state import ChunkState
from commlib.server.shard.shard import Shard
from commlib.server.worker.client_state import ClientState
from tests.support.tiers import examples

KEYS = {f"w[{i}]": 8 for i in range(3)}
WORKERS = 3


SPARSE = "significance:threshold=0.5+key_cache:entries=4+lossless"  # loses nothing of whole numbers
CODED = ValueCoding(way(SPARSE), way_of_values(SPARSE), {key: LayerSpec(key, (WORKERS,)) for key in KEYS})
CODINGS = st.sampled_from([None, CODED])


def cell(rule: Consistency, workers: Any, key: str, dtype: torch.dtype = torch.float64) -> ChunkState:
    values = torch.zeros(WORKERS, dtype=dtype)
    return ChunkState(values, lambda p: torch.optim.SGD(p, lr=1.0), workers, rule.threshold(), mean=False)


def pushed(worker: int, stamp: int, dtype: torch.dtype = torch.float64) -> Tensor:
    gradient = torch.zeros(WORKERS, dtype=dtype)
    gradient[worker] = -(4.0**stamp)
    return gradient


class Worker:
    """Pulls every key, then pushes every key, so many times."""

    def __init__(self, rank: int, view: View, steps: int, coding: ValueCoding | None = None) -> None:
        self.client, self.rank, self.steps = ClientState(rank, view, coding), rank, steps
        self.dtype = torch.float32 if coding else torch.float64
        self.begun = view.workers[rank]
        self.acknowledged = collections.defaultdict[str, set[int]](set)
        self.asked = False

    @property
    def done(self) -> bool:
        return all(self.client.clock(key) >= self.steps for key in KEYS) and not self.client.unacknowledged

    def act(self) -> list[Send]:
        if all(self.client.clock(key) >= self.steps for key in KEYS):
            return []
        if not self.asked:
            self.asked = True
            return [send for key in KEYS for send in self.client.pull(key)]
        if any(self.client.values(key) is None for key in KEYS):
            return []
        self.asked = False
        return [send for key in KEYS for send in self.push(key)]

    def push(self, key: str) -> list[Send]:
        clock, found = self.client.clock(key), self.client.values(key)
        assert found is not None
        own = digits(int(found[0][self.rank].item()))
        assert set(range(self.begun, clock)) <= own.keys(), f"{self.rank} at {clock} reads {key} without its own: {own}"
        return self.client.push(key, pushed(self.rank, clock, self.dtype))

    def handle(self, message: Message) -> list[Send]:
        if isinstance(message, Ack):
            self.acknowledged[message.key].add(message.stamp)
        return self.client.handle(message)

    def change(self, view: View) -> list[Send]:
        return self.client.change(view)


class Cluster:
    """Whoever makes views here knows at once who is dead; the others learn of a view when it reaches them."""

    def __init__(
        self,
        rule: Consistency,
        shards: int,
        copies: int,
        steps: int,
        rng: random.Random,
        coding: ValueCoding | None = None,
    ) -> None:
        self.rule, self.copies, self.steps, self.rng, self.coding = rule, copies, steps, rng, coding
        self.asked = 0  # for keys
        self.ring = HashRing(f"s{i}" for i in range(shards))
        self.view = first(self.ring, range(WORKERS), KEYS, copies)
        self.nodes: dict[str | int, Shard | Worker] = {s: self.shard(s) for s in self.ring.shards}
        self.nodes |= {rank: Worker(rank, self.view, steps, coding) for rank in range(WORKERS)}
        self.wires: dict[tuple[Any, Any], collections.deque[Any]] = collections.defaultdict(collections.deque)
        self.gone = dict[
            int, collections.defaultdict[str, set[int]]
        ]()  # what had been acknowledged to workers that died

    def shard(self, name: str, view: View | None = None) -> Shard:
        view = view or self.view
        dtype = torch.float32 if self.coding else torch.float64
        made = functools.partial(cell, self.rule, view.workers, dtype=dtype)
        return Shard(name, view, made, coding=self.coding)

    def at(self, name: str) -> Shard:
        node = self.nodes[name]
        assert isinstance(node, Shard)
        return node

    def send(self, source: Any, sends: list[Send]) -> None:
        for to, message in sends:
            self.asked += isinstance(message, Unknown)
            self.wires[source, to].append(copy.deepcopy(message))

    def workers(self) -> list[Worker]:
        return [n for n in self.nodes.values() if isinstance(n, Worker)]

    def step(self) -> None:
        """Delivers something, or has a worker do something."""
        waiting = [pair for pair, wire in self.wires.items() if wire]
        if waiting and self.rng.random() < 0.8:
            pair = self.rng.choice(waiting)
            message, node = self.wires[pair].popleft(), self.nodes.get(pair[1])
            if node is not None:
                self.send(pair[1], node.change(message) if isinstance(message, View) else node.handle(message))
        else:
            worker = self.rng.choice(self.workers())
            self.send(worker.rank, worker.act())

    def make_view(self, ring: HashRing, workers: list[int]) -> None:
        for name in ring.shards:  # all who live have the view before
            while wire := self.wires["views", name]:
                self.send(name, self.at(name).change(wire.popleft()))
        whole = {name: self.at(name).whole for name in ring.shards}
        clock = max(self.at(name).clock for name in ring.shards)
        view = following(self.view, ring, workers, KEYS, whole, clock, self.copies)
        self.ring = ring
        if view is not self.view:
            self.view = view
            for node in self.nodes:
                self.wires["views", node].append(view)

    def ranks(self) -> list[int]:
        return [w.rank for w in self.workers()]

    def kill_shard(self, *, undead: bool) -> None:
        """One that has no key for itself alone. Undead: it goes on, and does not hear that it was given up."""
        victim = self.rng.choice(self.ring.shards)
        if len(self.ring.shards) == 1:
            return
        try:
            self.make_view(self.ring.left(victim), self.ranks())
        except PeerLost:
            return
        self.wires["views", victim].clear()
        if undead:
            self.nodes[victim + "?"] = self.nodes.pop(victim)  # still wired, by its old name
            for pair in [pair for pair in self.wires if victim in pair]:
                self.wires[tuple(n + "?" if n == victim else n for n in pair)] = self.wires.pop(pair)
        else:
            del self.nodes[victim]

    def add_shard(self, name: str) -> None:
        old = View(self.view.number, {}, self.view.workers)
        self.nodes[name] = self.shard(name, old)
        self.make_view(self.ring.joined(name), self.ranks())

    def kill_worker(self) -> None:
        if len(self.workers()) > 1:
            worker = self.rng.choice(self.workers())
            del self.nodes[worker.rank]
            self.gone[worker.rank] = worker.acknowledged
            self.make_view(self.ring, self.ranks())

    def bring_back(self) -> None:
        for rank in list(self.gone):
            for (source, to), wire in self.wires.items():  # of its former life, over connections that are gone
                if rank in (source, to):
                    wire.clear()
            before = self.gone.pop(rank)
            self.make_view(self.ring, [*self.ranks(), rank])
            self.nodes[rank] = Worker(rank, self.view, self.steps, self.coding)
            self.nodes[rank].acknowledged = before  # type: ignore[union-attr]

    def settle(self) -> None:
        """Goes on until all workers are through."""
        for n in range(20_000):
            if n % 50 == 0:
                self.make_view(self.ring, self.ranks())  # those who were adopted become owners
            if all(w.done for w in self.workers()) and not any(self.wires.values()):
                return
            self.step()
        left = {pair: len(wire) for pair, wire in self.wires.items() if wire}
        waiting = [(w.rank, w.client.unacknowledged) for w in self.workers() if not w.done]
        raise AssertionError(f"{waiting} are not through: {left} under way in {self.view}")

    def check(self) -> None:
        for key, (owner, *replicas) in self.view.places.items():
            found = self.at(owner).cells[key]
            for replica in replicas:
                state = self.at(replica).cells[key].state_dict()
                assert torch.equal(state["values"], found.values)
                assert (state["ledger"]["included"], state["number"]) == (dict(found.included), found.number)
            for worker in self.workers():
                assert found.included[worker.rank] >= self.steps
            for rank in range(WORKERS):
                times = digits(int(found.values[rank].item()))
                acknowledged = self.gone[rank] if rank in self.gone else self.nodes[rank].acknowledged  # type: ignore[union-attr]
                assert set(times.values()) <= {1}, f"a push of {rank} to {key} was applied twice: {times}"
                assert acknowledged[key] <= times.keys(), f"an acknowledged push of {rank} to {key} is lost: {times}"


def digits(value: int) -> dict[int, int]:
    """Place → digit to base 4, of those that are not 0."""
    return {place: digit for place in range(26) if (digit := value >> 2 * place & 3)}


@pytest.mark.parametrize("spec", ["bsp", "ssp:1", "asp"])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_without_deaths_every_push_is_applied_once_everywhere(spec: str, copies: int) -> None:
    cluster = Cluster(make(spec), 3, copies, 4, random.Random(copies))
    cluster.settle()
    cluster.check()
    for key, at in cluster.view.places.items():
        assert cluster.at(at[0]).cells[key].values.tolist() == [(4**4 - 1) // 3] * WORKERS


@settings(max_examples=examples(60))
@given(st.sampled_from(["bsp", "ssp:1", "ssp:3", "asp"]), st.integers(2, 3), st.integers(0, 1 << 32), CODINGS)
def test_when_shards_die_or_seem_to_or_come_every_push_is_applied_once(
    spec: str, copies: int, seed: int, coding: ValueCoding | None
) -> None:
    rng = random.Random(seed)
    cluster = Cluster(make(spec), 3, copies, 6, rng, coding)
    for n in range(3):
        for _ in range(rng.randrange(150)):
            cluster.step()
        cluster.kill_shard(undead=rng.random() < 0.3)
        for _ in range(rng.randrange(80)):
            cluster.step()
        if rng.random() < 0.7:
            cluster.add_shard(f"new{n}")
    cluster.settle()
    cluster.check()
    for key, at in cluster.view.places.items():
        assert cluster.at(at[0]).cells[key].values.tolist() == [(4**6 - 1) // 3] * WORKERS


def test_keys_that_only_a_dead_shard_knew_are_asked_for_and_told() -> None:
    asked = 0
    for seed in range(5):
        cluster = Cluster(make("asp"), 3, 2, 6, random.Random(seed), CODED)
        while any(w.client.clock(key) < 2 for w in cluster.workers() for key in KEYS):
            cluster.step()
        assert cluster.asked == 0
        cluster.kill_shard(undead=False)
        cluster.settle()
        cluster.check()
        asked += cluster.asked
    assert asked


@settings(max_examples=examples(60))
@given(st.sampled_from(["bsp", "ssp:1", "asp"]), st.integers(1, 2), st.integers(0, 1 << 32), CODINGS)
def test_when_workers_die_and_come_back_nothing_acknowledged_is_lost_and_nothing_applied_twice(
    spec: str, copies: int, seed: int, coding: ValueCoding | None
) -> None:
    rng = random.Random(seed)
    cluster = Cluster(make(spec), 3, copies, 6, rng, coding)
    for _ in range(3):
        for act in (cluster.kill_worker, cluster.bring_back):
            for _ in range(rng.randrange(100)):
                cluster.step()
            if rng.random() < 0.8:
                act()
        if copies > 1:
            cluster.kill_shard(undead=False)
            cluster.add_shard(f"new{rng.random()}")
    cluster.settle()
    cluster.check()


def test_a_shard_that_is_to_own_what_it_does_not_have_says_so() -> None:
    shard = Shard("a", View(0, {}, {0: 0}), functools.partial(cell, BSP(), (0,)))
    with pytest.raises(CommlibError, match=r"shard a shall own w\[0\] in view 1, and does not have it"):
        shard.change(View(1, {"w[0]": ("a",)}, {0: 0}))


def test_a_message_of_a_view_that_cannot_be_is_refused() -> None:
    shard = Shard("a", View(3, {"w[0]": ("a",)}, {0: 0}), functools.partial(cell, BSP(), (0,)))
    with pytest.raises(ProtocolError, match="a message of view 5, at a shard that has view 3"):
        shard.handle(Pull(5, "w[0]", 0, 0))
    assert shard.handle(Pull(4, "w[0]", 0, 0)) == []
    ((to, values),) = shard.change(View(4, {"w[0]": ("a",)}, {0: 0}))
    assert (to, type(values)) == (0, Values)


def test_an_answer_to_an_older_question_is_none() -> None:
    client = ClientState(0, View(0, {"w[0]": ("a",)}, {0: 0}))
    client.pull("w[0]")
    client.push("w[0]", pushed(0, 0))
    client.pull("w[0]")
    for clock, good in ((0, False), (1, True)):
        client.handle(Values(0, "w[0]", 0, clock, pushed(0, 0), {0: clock}))
        assert (client.values("w[0]") is not None) is good


def test_an_acknowledgement_waits_for_every_replica() -> None:
    view = View(0, {"w[0]": ("a", "b", "c")}, {0: 0})
    a, b, c = (Shard(name, view, functools.partial(cell, BSP(), (0,))) for name in "abc")
    sends = a.handle(Push(0, "w[0]", 0, 0, pushed(0, 0)))
    assert [to for to, _ in sends] == ["b", "c"]
    ((_, from_b),), ((_, from_c),) = b.handle(sends[0][1]), c.handle(sends[1][1])
    assert a.handle(from_b) == []
    assert a.handle(Push(0, "w[0]", 0, 0, pushed(0, 0))) == []  # once more, and no sooner answered
    acks = a.handle(from_c)
    assert [(to, type(message)) for to, message in acks] == [(0, Ack)] * 2


def test_a_push_is_refused_that_was_made_with_values_older_than_the_rule_has_it() -> None:
    now = 100.0
    made = functools.partial(cell, make("downpour:time_lag=20"), (0, 1))
    shard = Shard("a", View(0, {"w[0]": ("a",)}, {0: 0, 1: 0}), made, lag=20.0, clock=lambda: now)
    shard.handle(Pull(0, "w[0]", 0, 0))
    refused = []
    for stamp, seconds in enumerate((19.0, 2.0, 0.0)):
        now += seconds
        if stamp == 2:
            shard.handle(Pull(0, "w[0]", 0, 2))
        ((_, ack),) = shard.handle(Push(0, "w[0]", 0, stamp, pushed(0, stamp)))
        assert isinstance(ack, Ack)
        refused.append(ack.refused)
    assert refused == [False, True, False]
    assert digits(int(shard.cells["w[0]"].values[0].item())).keys() == {0, 2}
    now += 1000
    ((_, ack),) = shard.handle(Push(0, "w[0]", 1, 0, pushed(1, 0)))  # it never asked here: nobody knows
    assert isinstance(ack, Ack)
    assert not ack.refused


def test_a_push_that_is_not_finite_is_refused_and_its_worker_told() -> None:
    view = View(0, {"w[0]": ("a",)}, {0: 0, 1: 0})
    shard = Shard("a", view, functools.partial(cell, BSP(), (0, 1)))
    client = ClientState(0, view)
    ((_, push),) = client.push("w[0]", torch.full((WORKERS,), torch.nan, dtype=torch.float64))
    assert shard.handle(push) == []
    acks = dict(shard.handle(Push(0, "w[0]", 1, 0, pushed(1, 0))))
    for message in acks.values():
        assert isinstance(message, Ack)
    client.handle(acks[0])
    assert client.refused == [("w[0]", 0)]
    assert client.unacknowledged == 0
    assert shard.cells["w[0]"].values.tolist() == [0.0, 1.0, 0.0]


def test_replicas_are_told_all_before_what_came_early_is_sent_on() -> None:
    made, key = functools.partial(cell, BSP(), (0,)), "w[0]"
    a, b = Shard("a", View(0, {key: ("a",)}, {0: 0}), made), Shard("b", View(0, {}, {0: 0}), made)
    view = View(1, {key: ("a", "b")}, {0: 0})
    assert a.handle(Push(1, key, 0, 0, pushed(0, 0))) == []  # its worker has the view already
    assert b.change(view) == []
    sends = a.change(view)
    assert [(to, type(message)) for to, message in sends] == [("b", Adopt), ("b", Replicate)]
    for _, message in sends:
        b.handle(message)
    assert b.cells[key].values.tolist() == a.cells[key].values.tolist() == [1.0, 0.0, 0.0]
    assert b.cells[key].number == a.cells[key].number == 1
