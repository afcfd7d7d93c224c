"""Simulated network: links between hosts that delay, cut and mend, a store at one of them, and endpoints of commlib.

A link is TCP's: what is sent over one connection arrives in order, and what is sent while the link is cut arrives once
it is mended. Nobody is told of a cut. Who ends is noticed by those who are connected to it, if its host still says so.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import queue
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from commlib.messaging.endpoint import Endpoint, Sent
from commlib.messaging.frame import Buffer
from commlib.messaging.peers import Arrival, Gone
from tests.support.simulation import primitives
from tests.support.simulation.world import Process, Waiters, World

_COPIED = 1 << 16  # bytes of a part that ZeroMQ copies at once, as transports/zeromq.py has it
_NOTICED_S = 0.5, 1.5  # seconds after which an endpoint sees that nobody listens at an address any more
_Store: Any = c10d.Store  # Python may add to it


class Network:
    """Hosts and the links between them, all that there are.

    Args:
        world: whose clock and seed are used.
        delay_s: of a message at least.
        rate: bytes a second of a connection.
    """

    def __init__(self, world: World, *, delay_s: float = 1e-4, rate: float = 1.25e8) -> None:
        self.world, self._delay_s, self.rate = world, delay_s, rate
        self._held: dict[frozenset[str], list[Callable[[], None]]] = {}
        self._arrives: dict[int, float] = {}
        self.endpoints: dict[str, SimulatedEndpoint] = {}
        self.ways: list[Way] = []
        self._ports = 0

    def cut(self, one: str, other: str) -> None:
        """Nothing gets from one host to the other, either way, and nobody is told."""
        if one != other:
            self.world.note(f"link {one} - {other} is cut")
            self._held.setdefault(frozenset((one, other)), [])

    def mend(self, one: str, other: str) -> None:
        """What was sent meanwhile arrives."""
        held = self._held.pop(frozenset((one, other)), None)
        if held is not None:
            self.world.note(f"link {one} - {other} is mended")
            for call in held:
                self.world.after(0.0, call)

    def reset(self, one: str, other: str) -> None:
        """Connections between two hosts break, with what is under way; ZeroMQ connects anew."""
        self.world.note(f"connections {one} - {other} are reset")
        for way in self.ways:
            if {way.source, way.target} == {one, other}:
                way.reset()

    def carry(self, source: str, target: str, connection: int, nbytes: int, call: Callable[[], None]) -> None:
        """Call when so many bytes have got there, behind what this connection was given before."""

        def send() -> None:
            now, random = self.world.now, self.world.random
            late = random.expovariate(20.0) if random.random() < 0.02 else 0.0
            when = now + self._delay_s * (1 + random.random()) + nbytes / self.rate + late
            when = self._arrives[connection] = max(when, self._arrives.get(connection, 0.0) + 1e-9)
            self.world.at(when, call)

        held = self._held.get(frozenset((source, target)))
        if held is None:
            send()
        else:
            held.append(send)

    def new_port(self) -> int:
        """Number that no other connection or address has."""
        self._ports += 1
        return self._ports


class SimulatedStore(_Store):  # type: ignore[misc]
    """``TCPStore`` of one process, which another process keeps: a call has no deadline, as TCPStore's has none.

    Args:
        network: between the two.
        keeper: process that has the values.
        values: of the keeper.
    """

    def __init__(self, network: Network, keeper: Process, values: dict[str, bytes]) -> None:
        super().__init__()
        self._network, self._keeper, self._values = network, keeper, values
        self._port = network.new_port(), network.new_port()
        self._broken = False

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self._values.__setitem__(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        self.wait([key], datetime.timedelta(seconds=300))
        found: bytes = self._ask(lambda: self._values[key])
        return found

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys, datetime.timedelta(seconds=300))
        found: list[bytes] = self._ask(lambda: [self._values[k] for k in keys])
        return found

    def add(self, key: str, amount: int) -> int:
        def change() -> int:
            now = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(now).encode()
            return now

        found: int = self._ask(change)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda: all(k in self._values for k in keys)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        def change() -> bytes:
            now = self._values.get(key)
            if now == _bytes(expected) or (now is None and not expected):
                self._values[key] = now = _bytes(desired)
            return _bytes(expected) if now is None else now

        found: bytes = self._ask(change)
        return found

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(lambda: self._values.pop(key, None) is not None))

    def num_keys(self) -> int:
        return int(self._ask(lambda: len(self._values)))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta = datetime.timedelta(seconds=300)) -> None:
        end = self._network.world.clock() + timeout.total_seconds()
        while not self.check(keys):
            if self._network.world.clock() > end:
                raise dist.DistStoreError(f"wait timeout after {timeout}, keys: {', '.join(keys)}")
            primitives.sleep(0.01)

    def _ask(self, call: Callable[[], Any]) -> Any:
        world = self._network.world
        assert world.current is not None
        me, keeper = world.current.process, self._keeper
        answers: list[Any] = []
        waits = Waiters()

        def answered(*what: Any) -> None:
            if not me.over:
                answers.extend(what)
                world.wake(waits)

        def broken() -> None:
            self._broken = True
            answered(None, dist.DistNetworkError("Connection reset by peer"))

        def asked() -> None:
            if keeper.over:
                self._network.carry(keeper.host, me.host, self._port[1], 0, broken)
            elif keeper.stopped:
                keeper.held.append(asked)
            else:
                found = call()
                self._network.carry(keeper.host, me.host, self._port[1], 0, lambda: answered(found, None))

        if self._broken:
            raise dist.DistNetworkError("Broken pipe")
        self._network.carry(me.host, keeper.host, self._port[0], 0, asked)
        keeper.at_end.append(
            lambda: None if answers else self._network.carry(keeper.host, me.host, self._port[1], 0, broken)
        )
        while not answers:
            world.wait(waits, None)
        found, error = answers[:2]
        if error is not None:
            raise error
        return found


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class SimulatedEndpoint(Endpoint):
    """Endpoint of the simulated network, in the place of :class:`commlib.transports.zeromq.ZeroMQ`. Without keys.

    Args:
        rank: this one's.
        network: it is at.
        options: of :class:`~commlib.messaging.endpoint.Endpoint`.
    """

    def __init__(
        self,
        rank: int,
        *,
        network: Network,
        host: str = "",
        hosts: Collection[str] = (),
        secret: str = "",
        **options: Any,
    ) -> None:
        super().__init__(rank, **options)
        self._network = network
        assert network.world.current is not None
        self.process = network.world.current.process
        self._address = f"tcp://{self.process.host}:{network.new_port()}"
        self.inbox = primitives.SimpleQueue()
        self._ways: dict[int, Way] = {}
        self.allowed: frozenset[str] = frozenset()
        self.public_key: str | None = None
        network.endpoints[self._address] = self
        self.process.at_end.append(self._gone)

    @property
    def address(self) -> str:
        return self._address

    def _open(self, peer: int, address: str, key: str | None) -> None:
        self._ways[peer] = Way(self._network, self, peer, address)
        self._network.ways.append(self._ways[peer])

    def _put(self, peer: int, buffers: Sequence[Buffer]) -> Sent:
        return self._ways[peer].put(buffers)

    def _take(self, seconds: float) -> Sequence[Arrival | Gone]:
        came: list[Arrival | Gone] = []
        with contextlib.suppress(queue.Empty):
            came.append(self.inbox.get(block=seconds > 0, timeout=seconds))
            while True:
                came.append(self.inbox.get_nowait())
        return came

    def _shut(self, peers: Sequence[int], seconds: float) -> None:
        end = self._network.world.now + seconds
        for peer, way in self._ways.items():
            while peer in peers and way.leaving and self._network.world.now < end:
                primitives.sleep(0.01)
        self._gone()

    def _gone(self) -> None:
        """Those who are connected to it see that, if their link lets them."""
        if self._network.endpoints.pop(self._address, None) is None:
            return
        for way in self._ways.values():
            way.leaving.clear()
        for way in self._network.ways:
            if way.address == self._address:
                way.ended(self)


class Way:
    """Connection of an endpoint to an address; it is made anew when it breaks.

    Args:
        network: it goes over.
        owner: endpoint that sends.
        peer: rank of the other.
        address: of the other.
    """

    def __init__(self, network: Network, owner: SimulatedEndpoint, peer: int, address: str) -> None:
        self._network, self._owner, self._peer, self.address = network, owner, peer, address
        self.source, self.target = owner.process.host, address.removeprefix("tcp://").rpartition(":")[0]
        self._connection = network.new_port()
        self._told = False
        self.leaving: collections.deque[_Message] = collections.deque()

    def put(self, buffers: Sequence[Buffer]) -> Sent:
        """Hand a message over; its large parts are read when it leaves."""
        message = _Message(self._network.world, buffers)
        self.leaving.append(message)
        if len(self.leaving) == 1:
            self._next()
        return message

    def reset(self) -> None:
        """What is under way is lost."""
        self._connection = self._network.new_port()

    def ended(self, other: SimulatedEndpoint) -> None:
        """Nobody listens at the address any more: the owner sees that after a while, behind what the other sent."""
        world = self._network.world
        if not self._told:
            self._told = True
            gone = Gone(self._peer, "its connection ended, and nobody listens at its address any more")
            seconds = world.random.uniform(*_NOTICED_S)

            def notice() -> None:
                world.after(seconds, lambda: self._owner.inbox.put(gone))

            back = next((w for w in other._ways.values() if w.address == self._owner.address), self)
            self._network.carry(self.target, self.source, back._connection, 0, notice)

    def _next(self) -> None:
        """The first message of the queue leaves as soon as the link takes it."""
        if not self.leaving:
            return
        message, connection = self.leaving[0], self._connection
        address, owner = self.address, self._owner

        def leave() -> None:
            if owner.process.stopped:  # its thread of input and output stands still, too
                owner.process.held.append(leave)
                return
            if owner.process.over or not self.leaving or self.leaving[0] is not message:
                return
            self.leaving.popleft()
            buffers = message.leave()

            def arrive() -> None:
                target = self._network.endpoints.get(address)
                if target is not None and connection == self._connection:
                    target.inbox.put(Arrival(connection, None, buffers))

            self._network.carry(self.source, self.target, connection, sum(map(len, buffers)), arrive)
            self._next()

        self._network.world.after(1e-5 * self._network.world.random.random(), leave)


class _Message:
    def __init__(self, world: World, buffers: Sequence[Buffer]) -> None:
        self._world, self._left, self._waits = world, False, Waiters()
        self._buffers = [b if memoryview(b).nbytes > _COPIED else bytes(b) for b in buffers]

    def leave(self) -> list[bytes]:
        """Its bytes, which its parts may be written to after."""
        self._left = True
        self._world.wake(self._waits)
        return [bytes(b) for b in self._buffers]

    def wait(self, timeout: float) -> bool:
        """Whether its parts may be written to again, within so many seconds."""
        if not self._left:
            self._world.wait(self._waits, timeout)
        return self._left
