"""Peers of an endpoint: the sessions by rank and by connection. Pure: waits for nothing and sends nothing.

Connections are one-way: each side opens its own to the other, and says hello on it. What a stranger says is refused and
logged, and disturbs nobody. A connection that takes the place of one that broke must have its session's mark, and go on
with the very next frame: one that has come before is a replay, and refused.
If some in between are missing, they were lost with the connection: nothing more comes of that peer, and both are told.

All of a :class:`Peer` but its sending half is touched under one lock, the endpoint's.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Hashable, Iterator, Sequence

from commlib.errors import CommlibError, PeerLost, ProtocolError
from commlib.messaging import flow_control
from commlib.messaging.frame import Buffer, Frame, Limits, decode
from commlib.messaging.session import Incoming, Outgoing

_log = logging.getLogger("commlib")
CUT_OFF = ("cut off",)
"""Keys of the error that tells a peer that its messages were lost."""
_LOGGED = 20  # refusals that are logged one by one: a flood of strangers must not become a flood of lines


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Buffers that came over one connection.

    Args:
        connection: the transport's name for it.
        identity: who is at its other end, where that is known for certain.
        buffers: of a frame, or of nothing sensible.
    """

    connection: Hashable
    identity: str | None
    buffers: Sequence[Buffer]


@dataclasses.dataclass(frozen=True)
class Gone:
    """Notice of a transport: nothing more comes of a peer, nor gets there.

    Args:
        rank: its.
        why: in words.
    """

    rank: int
    why: str


class Peer:
    """State of an endpoint's conversation with another rank.

    Args:
        rank: its.
        me: this one's.
        limits: of frames.
        window: of both directions, bytes.
    """

    def __init__(self, rank: int, me: int, limits: Limits, window: int) -> None:
        self.rank = rank
        self.address: str | None = None
        self.key: str | None = None  # that it is known to have
        self.sending = threading.Lock()
        """Held while a frame gets its number and is handed over: so they leave in the order of their numbers."""
        self.out = Outgoing(me, limits, session=secrets.randbits(63))
        self.credit = flow_control.CreditSender(window)
        self.incoming: Incoming | None = None
        self.identity: str | None = None
        self.connection: Hashable = None
        self.box: collections.deque[tuple[int, Frame]] = collections.deque()
        self.taken = flow_control.CreditReceiver(window)
        self.error: CommlibError | None = None
        self._heard = 0.0

    def news(self) -> str:
        """When it was last heard of, in words."""
        if self.incoming is None:
            return "it has never said hello"
        return f"its last word came {time.monotonic() - self._heard:.1f} s ago"

    def check(self) -> None:
        """Raises PeerLost if nothing more can come of it."""
        if self.error is not None:
            lost = PeerLost(str(self.error))
            lost.rank, lost.cut_off = self.rank, getattr(self.error, "cut_off", False)
            raise lost from self.error

    def hear(self, buffers: Sequence[Buffer]) -> Frame | None:
        """Take the peer's next frame and return it if it is for the user; what it means otherwise is noted."""
        if self.incoming is None or self.error is not None:
            return None
        try:
            frame = self.incoming.take(buffers)
            self._count(frame)
        except ProtocolError as e:
            self.error = e
            return None
        self._heard = time.monotonic()
        if frame.kind == "bye":
            self.error = PeerLost(f"rank {self.rank} has said goodbye")
        elif frame.kind == "error" and frame.keys == CUT_OFF:
            self.cut_off(frame.note)
        elif frame.kind == "error":
            self.error = PeerLost(f"rank {self.rank} gave up: {frame.note or 'it did not say why'}")
        return frame if frame.kind == "data" else None

    def cut_off(self, missed: str) -> None:
        """Note that messages between the two were lost, though it may live."""
        if self.error is None:
            lost = PeerLost(f"the connection of rank {self.rank} broke, and messages were lost with it: {missed}")
            lost.cut_off = True
            self.error = lost

    def _count(self, frame: Frame) -> None:
        try:
            if frame.kind == "taken":
                self.credit.taken(frame.clock)
            elif frame.kind == "data":
                self.taken.came(flow_control.cost(frame.parts))
        except ProtocolError as e:
            raise ProtocolError(f"from rank {self.rank}: {e}") from None


class Peers:
    """All peers of one endpoint.

    Args:
        me: this rank.
        job: who says hello from another one is a stranger.
        limits: of frames.
        window: bytes on their way to one peer at most.
        ranks: how many there are: who says that it is another is a stranger. None: any number.
    """

    def __init__(self, me: int, job: str, limits: Limits, window: int, ranks: int | None = None) -> None:
        self._me, self._job, self._limits, self._window, self._ranks = me, job, limits, window, ranks
        self._by_rank: dict[int, Peer] = {}
        self._by_connection: dict[Hashable, Peer] = {}
        self._came = 0
        self.refused = 0
        self.cut_off: list[tuple[Peer, str]] = []
        """Peers that are to be told that what they sent was lost, and what."""

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_rank.values()))

    def of(self, rank: int) -> Peer:
        """Peer of this rank, known from now on."""
        if rank not in self._by_rank:
            self._by_rank[rank] = Peer(rank, self._me, self._limits, self._window)
        return self._by_rank[rank]

    def connection(self, rank: int) -> Hashable:
        """Connection over which frames of this rank come; None, if none have."""
        peer = self._by_rank.get(rank)
        return None if peer is None else peer.connection

    def forget(self, peer: Peer) -> None:
        """Forget a peer, which may come anew."""
        del self._by_rank[peer.rank]
        self._by_connection.pop(peer.connection, None)

    def deliver(self, arrival: Arrival | Gone) -> None:
        """Puts what came into its sender's box."""
        if isinstance(arrival, Gone):
            lost = self._by_rank.get(arrival.rank)
            if lost is not None and lost.error is None:
                lost.error = PeerLost(f"rank {arrival.rank} is gone: {arrival.why}")
            return
        peer = self._by_connection.get(arrival.connection) or self._introduced(arrival)
        if isinstance(peer, str):
            self._refuse(arrival, peer)
            return
        frame = peer.hear(arrival.buffers)
        if frame is not None:
            self._came += 1
            peer.box.append((self._came, frame))

    def next(self, whose: Peer | None) -> tuple[Peer, Frame, int | None] | None:
        """(sender, its next frame, how much it shall be told has been taken), or None; of all, the one that came first.

        Raises:
            PeerLost: nothing more can come; of any peer, told once.
        """
        asked = [whose] if whose is not None else list(self)
        first = min((p for p in asked if p.box), key=lambda p: p.box[0][0], default=None)
        if first is not None:
            frame = first.box.popleft()[1]
            return first, frame, first.taken.take(flow_control.cost(frame.parts))
        for peer in asked:
            if peer.error is not None and whose is None:
                self.forget(peer)
            peer.check()
        return None

    def _introduced(self, arrival: Arrival) -> Peer | str:
        """Peer that a new connection belongs to, or why it is refused."""
        try:
            frame = decode(arrival.buffers, self._limits)
        except ProtocolError as e:
            return str(e)
        peer, says = self._by_rank.get(frame.sender), f"it says that it is rank {frame.sender}"
        if frame.sender == self._me or (self._ranks is not None and frame.sender >= self._ranks):
            return f"{says}, and there is no such other"
        if frame.kind == "hello":
            if frame.keys != (self._job,):
                return f"{says} of job {', '.join(frame.keys)!r}, which is another"
            if peer is not None and peer.incoming is not None:
                return f"{says}, which has said hello before"
            if peer is not None and peer.key not in (None, arrival.identity):
                return f"{says}, whose key is another"
            peer = self.of(frame.sender)
            peer.incoming, peer.identity = Incoming(frame.sender, self._limits), arrival.identity
        elif peer is None or peer.incoming is None:
            return f"{says}, and has not said hello"
        elif arrival.identity != peer.identity:
            return f"{says}, whose key is another"
        elif not peer.incoming.awaits(frame):
            if peer.error is None and (missed := peer.incoming.missed(frame)) is not None:
                peer.cut_off(missed)
                self.cut_off.append((peer, missed))
            return f"{says}, and does not go on where that rank was: frame {frame.number}"
        self._by_connection.pop(peer.connection, None)
        self._by_connection[arrival.connection], peer.connection = peer, arrival.connection
        return peer

    def _refuse(self, arrival: Arrival, why: str) -> None:
        self.refused += 1
        if self.refused <= _LOGGED:
            key = f" with key {arrival.identity}" if arrival.identity else ""
            _log.warning("rank %d refused a frame of a stranger%s: %s", self._me, key, why)
        if self.refused == _LOGGED:
            _log.warning("rank %d counts further ones, and logs them no more", self._me)
