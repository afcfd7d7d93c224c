"""Carries out the collectives of one process group over an endpoint, one after another.

Ordering: calls are taken from the queue from its head, under the lock, and only while none is under way. So they are
carried out one at a time, in the order in which they were made, whichever thread does it: the engine's own, or one that
waits for a work (which saves waking the other). All ranks make the same calls in the same order, and a call's schedule
waits only for messages of that very call. So by induction a rank that has made its call gets what it waits for, or one
of these does not come: then the deadline ends the call, and the group with it, for ranks are out of step for good.

Every message says which call of the group it belongs to, the how-manieth and what: a rank that made another is named.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from commlib.endpoint import Endpoint, Sent
from commlib.errors import CommlibError, PeerLost, ProtocolError
from commlib.schedule.steps import Free, Recv, Schedule, Send

from .values import from_buffer, to_buffer
from .work import Work


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective of this rank.

    Args:
        work: what the caller waits for.
        schedule: what to do.
        done: called once that is through, before the work ends.
        timeout: seconds, from its beginning.
    """

    work: Work
    schedule: Schedule
    done: Callable[[], None]
    timeout: float


class Engine:
    """One process group's.

    Args:
        endpoint: connected to all others of the group, and used by nobody else.
        name: of the group.
    """

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._endpoint, self._name = endpoint, name
        self._lock = threading.Condition()
        self._queue: collections.deque[Call] = collections.deque()
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._count = 0
        self._thread = threading.Thread(target=self._serve, name=f"commlib-zmq-{name}", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """Calls that have begun."""
        return self._count

    def submit(self, call: Call) -> Work:
        """Puts a call behind those before it. After a failure it fails at once, and for the same reason."""
        with self._lock:
            error = self._error
            if error is None:
                self._queue.append(call)
                self._lock.notify_all()
        if error is not None:
            call.work.end(error)
        return call.work

    def help(self, work: Work) -> None:
        """Carries out calls up to this one, if no other thread does; else waits for that to come to something."""
        with self._lock:
            if work.is_completed():
                return
            if self._busy or not self._queue:
                self._lock.wait()
                return
            call = self._begin()
        self._carry_out(call)

    def close(self, error: BaseException) -> None:
        """What is not through fails with ``error``. The endpoint is the caller's to close, after this."""
        with self._lock:
            self._closed = True
            self._error = self._error or error
            left, self._queue = list(self._queue), collections.deque()
            self._lock.notify_all()
        for call in left:
            call.work.end(error)

    def join(self, seconds: float) -> None:
        """Waits for the thread to end."""
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    # -- whose turn it is -----------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or (self._queue and not self._busy))
                if self._closed:
                    return
                call = self._begin()
            self._carry_out(call)

    def _begin(self) -> Call:
        self._busy = True
        self._count += 1
        return self._queue.popleft()

    def _carry_out(self, call: Call) -> None:
        error: BaseException | None = None
        try:
            self._run(call)
            call.done()
        except BaseException as e:
            error = self._named(call, e)
        with self._lock:
            self._busy = False
            left: list[Call] = []
            if error is not None:
                self._error = self._error or error
                left, self._queue = list(self._queue), collections.deque()
        for each in (call, *left):
            each.work.end(error)
        with self._lock:
            self._lock.notify_all()
        if error is not None:
            self._endpoint.abort(str(error))  # the others need not wait for their deadline

    # -- one call -------------------------------------------------------------------------------

    def _run(self, call: Call) -> None:
        end = time.monotonic() + call.timeout
        sent: list[Sent] = []
        answer: Tensor | None = None
        keys, clock = (call.work.what,), self._count
        while True:
            try:
                step = call.schedule.send(answer)
            except StopIteration:
                break
            answer, left = None, max(0.0, end - time.monotonic())
            if isinstance(step, Send):
                sent.append(
                    self._endpoint.send(step.to, clock=clock, keys=keys, parts=(to_buffer(step.tensor),), timeout=left)
                )
            elif isinstance(step, Recv):
                answer = self._receive(call, step, left)
            else:
                assert isinstance(step, Free)
                sent = self._free(sent, end)
        self._free(sent, end)

    def _receive(self, call: Call, step: Recv, left: float) -> Tensor:
        frame = self._endpoint.recv(step.source, timeout=left)
        if frame.keys != (call.work.what,) or frame.clock != self._count:
            raise ProtocolError(
                f"rank {step.source} is at its call {frame.clock}, {', '.join(frame.keys)}; rank {self._endpoint.rank} "
                f"at its call {self._count}, {call.work.what}: all ranks must make the same calls in the same order"
            )
        part = frame.parts[0] if frame.parts else b""
        came, due = memoryview(part).nbytes, step.like.numel() * step.like.itemsize
        if came != due:
            raise ProtocolError(
                f"rank {step.source} sent {came} bytes for {call.work.what}, and rank {self._endpoint.rank} expects "
                f"{due}: their tensors differ in size"
            )
        return from_buffer(part, step.like.dtype)

    def _free(self, sent: list[Sent], end: float) -> list[Sent]:
        for each in sent:
            if not each.wait(max(0.0, end - time.monotonic())):
                raise PeerLost("what was sent has not left")
        return []

    def _named(self, call: Call, error: BaseException) -> BaseException:
        """The error, which says what it ended."""
        if self._closed and self._error is not None:
            return self._error
        if not isinstance(error, CommlibError):
            return error
        where = f"group {self._name!r}, call {self._count}: {call.work.what}"
        known: dict[str, Any] = {"kind": type(error) if type(error) in (PeerLost, ProtocolError) else CommlibError}
        named: CommlibError = known["kind"](f"{error} ({where}, {call.timeout:g} s)")
        named.__cause__ = error
        return named
