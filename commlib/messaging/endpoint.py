"""Endpoint of a rank: frames go out to others and come in, in order for each peer, and none is lost without a word.

Here is what all transports share: who is who (:mod:`commlib.messaging.peers`), how much may be on its way
(:mod:`commlib.messaging.flow_control`), whose turn it is to read (:mod:`commlib.messaging.shared_reader`), deadlines,
and the end. A transport adds how buffers travel: ``_open``, ``_put``, ``_take`` and ``_shut``.

Ordering: a frame gets its number and is handed over under its peer's own lock. What comes is sorted under the lock of
Turns, by one thread at a time. The first is never waited for while the second is held, nor is either held while a
thread waits for the network.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from commlib.errors import AuthenticationError, CommlibError, PeerLost
from commlib.messaging import flow_control
from commlib.messaging.frame import DEFAULT, Buffer, Frame, Limits
from commlib.messaging.peers import CUT_OFF, Arrival, Gone, Peer, Peers
from commlib.messaging.shared_reader import SharedReader

E = TypeVar("E", bound="Endpoint")
T = TypeVar("T")
_FAREWELL_S = 0.25
_ABORT_S = 2.0  # the most that telling why may take: nobody waits for an answer, and a busy machine is in time


class Sent(Protocol):
    """A frame that is on its way."""

    def wait(self, timeout: float) -> bool:
        """Whether its parts may be written to again, within so many seconds."""


class Endpoint(ABC):
    """A context manager, for any number of threads.

    Args:
        rank: this one's.
        job: endpoints of another one are strangers.
        timeout: seconds that anything waits where it is not told otherwise.
        limits: of a frame.
        window: bytes on their way to one peer at most, and a larger frame. The same on all ranks.
        ranks: how many there are at most; None: any number.
    """

    def __init__(
        self,
        rank: int,
        *,
        job: str = "",
        timeout: float = 60.0,
        limits: Limits = DEFAULT,
        window: int = flow_control.WINDOW,
        ranks: int | None = None,
    ) -> None:
        if not timeout > 0 or window < 1:
            raise ValueError(f"timeout and window must be above 0, got {timeout} s and {window} bytes")
        self.rank, self._job, self._timeout, self._window = rank, job, timeout, window
        self._limits = limits
        self._peers = Peers(rank, job, limits, window, ranks)
        self._turns: SharedReader[Arrival | Gone] = SharedReader(self._take, self._peers.deliver)
        self._closed = threading.Event()

    @property
    @abstractmethod
    def address(self) -> str:
        """Where others reach it."""

    @property
    def refused(self) -> int:
        """Frames of strangers, and of such as pretended to be another."""
        return self._peers.refused

    def reaches(self, peer: int) -> bool:
        """Whether it is connected to a peer; that need not be there."""
        with self._turns.lock:
            return self._peers.of(peer).address is not None

    def connect(self, peer: int, address: str, *, key: str | None = None) -> None:
        """Opens the way to a peer and says hello. It need not be there yet; that it never comes is told by a deadline.

        Frames go both ways only if it connects to this one, too.

        Args:
            peer: its rank.
            address: its :attr:`address`.
            key: its public key, where the transport has such.

        Raises:
            ValueError: a bad address or key, or there is a way to this peer already.
            AuthenticationError: no key where one is needed; or another than that of who has said hello as this rank.
            CommlibError: the endpoint is closed.
        """
        with self._turns.lock:
            self._check_open()
            to = self._peers.of(peer)
            if to.address is not None:
                raise ValueError(f"rank {peer} is reached at {to.address} already")
            if key is not None and to.identity not in (None, key):
                raise AuthenticationError(
                    f"what said hello as rank {peer} has key {to.identity}, and that is not {key}"
                )
            to.address, to.key = address, key
        try:
            with to.sending:
                self._check_open()
                self._open(peer, address, key)
                self._put(peer, to.out.frame("hello", keys=(self._job,)))
        except BaseException:
            to.address = to.key = None
            raise

    def send(self, peer: int, *, timeout: float | None = None, **fields: Any) -> Sent:
        """Sends a frame. Its parts are not copied, and must not be written to before what is returned says so.

        Args:
            peer: connected.
            timeout: seconds to wait for the peer to take what it was sent before.
            fields: of :class:`~commlib.messaging.frame.Frame`: clock, keys, dtype, shape, codec, flags, note, parts.

        Raises:
            ValueError: a bad frame, or no way to this peer.
            PeerLost: it takes nothing, has said goodbye, or what it said was wrong.
            CommlibError: the endpoint is closed.
        """
        to, cost = self._way(peer), flow_control.cost(fields.get("parts", ()))
        seconds = self._timeout if timeout is None else timeout
        if self._wait(functools.partial(self._admitted, to, cost), seconds) is None:
            raise PeerLost(
                f"rank {peer} has not taken what rank {self.rank} sent to {to.address} for {seconds:g} s: "
                f"{to.credit.waiting} bytes are on their way, {self._window} may be; {to.news()}"
            )
        return self._send(to, cost, fields)

    def offer(self, peer: int, **fields: Any) -> Sent | None:
        """As :meth:`send`, but None instead of waiting: nothing is sent then. :meth:`await_room` tells when to try."""
        to, cost = self._way(peer), flow_control.cost(fields.get("parts", ()))
        with self._turns.lock:
            admitted = self._admitted(to, cost)
        return self._send(to, cost, fields) if admitted else None

    def recv(self, peer: int | None = None, *, timeout: float | None = None) -> Frame:
        """The next frame of a peer, or of any: then, of those that wait, the one that came first.

        Its parts are the buffers that came.

        Raises:
            PeerLost: nothing came in time, the peer has said goodbye, or what it said was wrong. (Of any, told once.)
            CommlibError: the endpoint is closed.
        """
        whose = self._known(peer)
        seconds = self._timeout if timeout is None else timeout
        found = self._wait(functools.partial(self._next, whose), seconds)
        if found is None:
            who = "any rank" if whose is None else f"rank {peer}: {whose.news()}"
            raise PeerLost(f"rank {self.rank} waited {seconds:g} s, and nothing came from {who}")
        return self._taken(found)

    def await_room(self, room: Mapping[int, int], *, or_of: int | None = None, timeout: float) -> Frame | None:
        """Waits until a peer has room for more (None); or for another's next frame, if that comes first.

        Args:
            room: peer → bytes of the parts that are to be sent to it.
            or_of: whose frame.
            timeout: seconds.

        Raises:
            PeerLost: neither in time, or one of these peers is gone.
            CommlibError: the endpoint is closed.
        """
        of, full = self._known(or_of), {self._way(p): flow_control.cost_of(n) for p, n in room.items()}

        def ready() -> tuple[Peer, Frame, int | None] | Literal[True] | None:
            found = self._next(of) if of is not None else None
            for to in full:
                to.check()
            return found or (True if any(to.credit.admits(cost) for to, cost in full.items()) else None)

        found = self._wait(ready, timeout)
        if found is None:
            why = "; ".join(f"rank {p.rank} has not taken {p.credit.waiting} bytes, {p.news()}" for p in full)
            also = f"; nothing came from rank {of.rank}, {of.news()}" if of is not None else ""
            raise PeerLost(f"rank {self.rank} waited {timeout:g} s: {why}{also}")
        return self._taken(found) if isinstance(found, tuple) else None

    def gone(self, seconds: float) -> dict[int, str]:
        """Peers that are gone, as far as that is known after so many seconds at most: rank → why.

        What has come of them before is kept.

        Raises:
            CommlibError: the endpoint is closed.
        """

        def found() -> dict[int, str] | None:
            self._check_open()
            return {peer.rank: str(peer.error) for peer in self._peers if peer.error is not None} or None

        return self._wait(found, seconds) or {}

    def close(self, timeout: float = 5.0) -> None:
        """Says goodbye; what was sent leaves before, for so many seconds at most. Again: nothing."""
        self._end("bye", "", timeout)

    def abort(self, why: str) -> None:
        """Tells the peers why, as well as that goes, drops what has not left, and closes."""
        self._end("error", why[: self._limits.note], _ABORT_S)

    def __enter__(self: E) -> E:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.abort(f"{type(error).__name__}: {error}")

    # -- what a transport is --------------------------------------------------------------------

    @abstractmethod
    def _open(self, peer: int, address: str, key: str | None) -> None:
        """Opens the way to a peer, in place of one there was; does not wait for it. ValueError: a bad address."""

    @abstractmethod
    def _put(self, peer: int, buffers: Sequence[Buffer]) -> Sent:
        """Hands a frame over, one thread at a time for a peer; does not wait. PeerLost: it never takes it."""

    @abstractmethod
    def _take(self, seconds: float) -> Sequence[Arrival | Gone]:
        """Arrivals, waiting for so long at most; one thread at a time."""

    @abstractmethod
    def _shut(self, peers: Sequence[int], seconds: float) -> None:
        """Gives everything back, once what was handed over for these has left, or so many seconds are over.

        No thread is in any of the other functions, or comes any more.
        """

    # -- else -----------------------------------------------------------------------------------

    def _known(self, peer: int | None) -> Peer | None:
        with self._turns.lock:
            return None if peer is None else self._peers.of(peer)

    def _way(self, peer: int) -> Peer:
        with self._turns.lock:
            to = self._peers.of(peer)
        if to.address is None:
            raise ValueError(f"rank {self.rank} has no way to rank {peer}: connect({peer}, its address) first")
        return to

    def _wait(self, ready: Callable[[], T | None], seconds: float) -> T | None:
        try:
            return self._turns.wait(ready, time.monotonic() + seconds)
        finally:
            if self._peers.cut_off:
                self._tell_cut_off()

    def _tell_cut_off(self) -> None:
        """Tell peers whose messages were lost with a connection: they would wait for the answers."""
        with self._turns.lock:
            found, self._peers.cut_off = self._peers.cut_off, []
        for peer, missed in found:
            if peer.address is not None and not self._closed.is_set():
                with contextlib.suppress(PeerLost, ValueError), peer.sending:
                    self._put(peer.rank, peer.out.frame("error", note=missed, keys=CUT_OFF))

    def _send(self, to: Peer, cost: int, fields: Mapping[str, Any]) -> Sent:
        try:
            return self._say(to, "data", **fields)
        except (ValueError, TypeError):
            with self._turns.lock:
                to.credit.kept(cost)
            raise

    def _taken(self, found: tuple[Peer, Frame, int | None]) -> Frame:
        sender, frame, total = found
        if total is not None and sender.address is not None:
            with contextlib.suppress(CommlibError):  # it is gone, or this one closed meanwhile: the frame is good
                self._say(sender, "taken", clock=total)
        return frame

    def _admitted(self, to: Peer, cost: int) -> bool | None:
        self._check_open()
        to.check()
        if not to.credit.admits(cost):
            return None
        to.credit.sent(cost)
        return True

    def _next(self, whose: Peer | None) -> tuple[Peer, Frame, int | None] | None:
        self._check_open()
        return self._peers.next(whose)

    def _say(self, to: Peer, kind: str, **fields: Any) -> Sent:
        with to.sending:
            self._check_open()
            return self._put(to.rank, to.out.frame(kind, **fields))

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise CommlibError(f"the endpoint of rank {self.rank} is closed")

    def _end(self, kind: str, note: str, seconds: float) -> None:
        with self._turns.lock:
            if self._closed.is_set():
                return
            self._closed.set()
            self._turns.lock.notify_all()
        self._turns.end(timeout=1.0)
        for arrival in self._take(0.0):  # who has said goodbye hears none
            self._peers.deliver(arrival)
        told = []
        for peer in [p for p in self._peers if p.address is not None]:
            with contextlib.suppress(PeerLost), peer.sending:  # and so no thread is in _put any more
                if peer.error is None:
                    self._put(peer.rank, peer.out.frame(kind, note=note))
                    told.append(peer)
        if kind == "bye":
            self._hear_goodbyes(told, time.monotonic() + min(seconds, _FAREWELL_S))
        self._shut([peer.rank for peer in told], seconds)

    def _hear_goodbyes(self, peers: Sequence[Peer], end: float) -> None:
        """Peers mostly close at the same time, and what is said to one that has closed never leaves."""
        while any(p.error is None and p.incoming is not None for p in peers) and (left := end - time.monotonic()) > 0:
            for arrival in self._take(left):
                self._peers.deliver(arrival)
