"""``send`` and ``recv``: messages from one rank to another, beside the collectives and in no order with them.

They have an endpoint of their own, made when the first is sent or received: a message that nobody receives yet must not
stand in a collective's way. One thread for each rank that is sent to, so that none waits for another's; one that takes
what comes, while there is a receive that waits. What each of them touches besides its queue is under one lock.

Which message is for which receive: by sender and tag, in order. Pure.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from commlib.errors import CommlibError, PeerLost, ProtocolError
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.frame import Buffer, Frame, from_buffer, to_buffer
from commlib.transports.process_group.algorithms.steps import Position

from .host_tensors import HostTensor
from .work import CollectiveWork

M = TypeVar("M")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Wanted(Generic[T]):
    """Receive that was posted, and what it wants.

    Args:
        source: rank; None is any.
        tag: of the message.
        ticket: whose it is.
    """

    source: int | None
    tag: int
    ticket: T

    def takes(self, source: int, tag: int) -> bool:
        """Whether such a message is for it."""
        return self.source in (None, source) and self.tag == tag


class Matcher(Generic[M, T]):
    """Messages with one tag from one rank are received in the order sent, by receives in the order posted."""

    def __init__(self) -> None:
        self._wanted: list[Wanted[T]] = []
        self._came: list[tuple[int, int, M]] = []

    @property
    def wanted(self) -> list[Wanted[T]]:
        """Receives that still wait."""
        return list(self._wanted)

    def want(self, wanted: Wanted[T]) -> tuple[int, M] | None:
        """(source, message) that has come before, or None: then it waits."""
        for i, (source, tag, message) in enumerate(self._came):
            if wanted.takes(source, tag):
                del self._came[i]
                return source, message
        self._wanted.append(wanted)
        return None

    def came(self, source: int, tag: int, message: M) -> T | None:
        """Ticket that this message is for, or None: then the message waits."""
        for i, wanted in enumerate(self._wanted):
            if wanted.takes(source, tag):
                del self._wanted[i]
                return wanted.ticket
        self._came.append((source, tag, message))
        return None

    def forget(self, ticket: T) -> None:
        """Withdraw a receive that waits no more."""
        self._wanted = [w for w in self._wanted if w.ticket is not ticket]


_SLICE_S = 0.2
_Message = list[Frame]
E = TypeVar("E", bound=Endpoint)


class Receive:
    """Receive that waits for its message."""

    def __init__(self, work: CollectiveWork, flat: HostTensor, end: float, what: str) -> None:
        self.work, self.flat, self.end, self.what = work, flat, end, what

    def fill(self, source: int, message: _Message) -> None:
        """Take the message that has come."""
        came, due = sum(f.nbytes for f in message), self.flat.values.nbytes
        if came != due:
            self.work.end(ProtocolError(f"{self.what}: rank {source} sent {came} bytes, and the tensor has {due}"))
            return
        start = 0
        for frame in message:
            for part in frame.parts:
                got = from_buffer(part, self.flat.values.dtype)
                self.flat.values[start : start + len(got)].copy_(got)
                start += len(got)
        self.flat.back()
        self.work.source = source
        self.work.end()


class Mailbox(Generic[E]):
    """Mailbox of one process group.

    Args:
        place: this rank.
        open: makes the endpoint, and tells the others where it is.
        connect: opens the way to a rank, waiting so many seconds until that says where it is.
    """

    def __init__(self, place: Position, open: Callable[[], E], connect: Callable[[int, E, float], None]) -> None:
        self._place, self._open, self._connect = place, open, connect
        self._lock = threading.Condition()
        self._endpoint: E | None = None
        self._threads: list[threading.Thread] = []
        self._ways: dict[int, queue.SimpleQueue[Any]] = {}
        self._known: set[int] = set()
        self._matcher: Matcher[_Message, Receive] = Matcher()
        self._partly: dict[int, _Message] = {}
        self._gone: dict[int | None, PeerLost] = {}
        self._reader: threading.Thread | None = None
        self._closed: BaseException | None = None

    def send(self, tensor: Tensor, to: int, tag: int, seconds: float) -> CollectiveWork:
        """Through once the tensor may be written to."""
        work = CollectiveWork(f"send({tensor.numel()} × {tensor.dtype}, to rank {to}, tag {tag})", [tensor])
        flat = HostTensor(tensor)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            endpoint, way = self._here(), self._ways.get(to)
            if way is None:
                way = self._ways[to] = queue.SimpleQueue()
                self._thread(f"to-{to}", self._sender, endpoint, to, way)
        way.put((work, flat, tag, time.monotonic() + seconds))
        return work

    def recv(self, tensor: Tensor, source: int | None, tag: int, seconds: float) -> CollectiveWork:
        """Through once it is filled; ``CollectiveWork.source_rank`` says by whom."""
        who = "any rank" if source is None else f"rank {source}"
        what = f"recv({tensor.numel()} × {tensor.dtype}, of {who}, tag {tag})"
        flat = HostTensor(tensor, read=False)
        work = CollectiveWork(what, [tensor], staged=flat.staged)
        receive = Receive(work, flat, time.monotonic() + seconds, what)
        with self._lock:
            if self._closed is not None:
                raise self._closed
            endpoint = self._here()
            found = self._matcher.want(Wanted(source, tag, receive))
            if found is None and source in self._gone:
                self._matcher.forget(receive)
                raise self._gone[source]
            if found is None and self._reader is None:
                self._reader = self._thread("reader", self._read, endpoint)
            self._lock.notify_all()
        if found is not None:
            receive.fill(*found)
        return work

    def close(self, error: BaseException) -> None:
        """Sends what was to be sent, and says goodbye; receives that wait fail with ``error``."""
        with self._lock:
            self._closed = error
            left = self._matcher.wanted
            for wanted in left:
                self._matcher.forget(wanted.ticket)
            endpoint, ways = self._endpoint, list(self._ways.values())
            threads = [t for t in self._threads if t is not self._reader]
            self._lock.notify_all()
        for way in ways:
            way.put(None)
        for thread in threads:
            thread.join(5.0)
        for wanted in left:
            wanted.ticket.work.end(error)
        if endpoint is not None:
            endpoint.close()

    def _here(self) -> E:
        if self._endpoint is None:
            self._endpoint = self._open()
        return self._endpoint

    def _thread(self, name: str, run: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, name=f"commlib-zmq-mail-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    # -- sending --------------------------------------------------------------------------------

    def _sender(self, endpoint: E, to: int, way: queue.SimpleQueue[Any]) -> None:
        while (job := way.get()) is not None:
            work, flat, tag, end = job
            error: BaseException | None = None
            try:
                self._reach(endpoint, to, end)
                flat.ready()
                self._send(endpoint, to, flat.values, tag, end)
            except BaseException as e:
                error = e if not isinstance(e, CommlibError) else type(e)(f"{work.what}: {e}")
            work.end(error)

    def _send(self, endpoint: E, to: int, flat: Tensor, tag: int, end: float) -> None:
        parts: list[tuple[Buffer, ...]] = [(to_buffer(p),) for p in self._place.pieces(flat)] or [()]
        sent = [
            endpoint.send(
                to, clock=tag, flags=int(i == len(parts) - 1), parts=part, timeout=max(0.0, end - time.monotonic())
            )
            for i, part in enumerate(parts)
        ]
        for each in sent:
            if not each.wait(max(0.0, end - time.monotonic())):
                raise PeerLost(f"rank {to} has not taken it")

    def _reach(self, endpoint: E, peer: int, end: float) -> None:
        """Opens the way to a rank; once, whoever comes first."""
        with self._lock:
            while peer in self._known:  # opened, or being so by another thread
                if endpoint.reaches(peer):
                    return
                self._lock.wait(0.05)
            self._known.add(peer)
        try:
            self._connect(peer, endpoint, max(0.0, end - time.monotonic()))
        except BaseException:
            with self._lock:
                self._known.discard(peer)
            raise

    # -- receiving ------------------------------------------------------------------------------

    def _read(self, endpoint: E) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed is not None or bool(self._matcher.wanted))
                if self._closed is not None:
                    return
            try:
                frame = endpoint.recv(timeout=_SLICE_S)
                self._reach(endpoint, frame.sender, time.monotonic() + 5.0)
            except PeerLost as e:
                self._lost(e)
                continue
            except CommlibError as e:
                self._give_up(e)
                return
            self._came(frame)

    def _came(self, frame: Frame) -> None:
        message = self._partly.setdefault(frame.sender, [])
        message.append(frame)
        if not frame.flags:
            return
        del self._partly[frame.sender]
        with self._lock:
            receive = self._matcher.came(frame.sender, frame.clock, message)
        if receive is not None:
            receive.fill(frame.sender, message)

    def _lost(self, error: PeerLost) -> None:
        """Nothing came for a while, or nothing more comes of a rank: who waits for that, or waited too long, fails."""
        now = time.monotonic()
        with self._lock:
            if error.rank is not None:
                self._gone[error.rank] = error
            over = [w.ticket for w in self._matcher.wanted if w.ticket.end <= now]
            gone = [w.ticket for w in self._matcher.wanted if error.rank is not None and w.source == error.rank]
            for receive in (*over, *gone):
                self._matcher.forget(receive)
        for receive in dict.fromkeys((*gone, *over)):
            why = str(error) if receive in gone else "nothing came in time"
            receive.work.end(PeerLost(f"{receive.what} at rank {self._place.rank}: {why}"))

    def _give_up(self, error: CommlibError) -> None:
        with self._lock:
            self._closed = self._closed or error
            left = self._matcher.wanted
            for wanted in left:
                self._matcher.forget(wanted.ticket)
        for wanted in left:
            wanted.ticket.work.end(error)
