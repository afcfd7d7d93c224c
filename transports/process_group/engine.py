"""Carries out the collectives of one process group over an endpoint, one after another.

Ordering: calls are taken from the queue from its head, under the lock, and only while none is under way. So they are
carried out one at a time, in the order in which they were made, whichever thread does it: the engine's own, or one that
waits for a work (which saves waking the other). All ranks make the same calls in the same order, and a call's schedule
waits only for messages of that very call. So by induction a rank that has made its call gets what it waits for, or one
of these does not come: then the deadline ends the call, and the group with it, for ranks are out of step for good.

Whoever has carried out a call tells its work, and with that runs what others have put behind its future. That may wait
for a later call, as PyTorch's powerSGD_hook does. So no call is under way by then, and another thread takes the next
one: if all that serve are busy so, one more begins, and ends when it is one too many.

Every message says which call of the group it belongs to, the how-manieth and what: a rank that made another is named.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from torch import Tensor

from commlib.errors import CommlibError, PeerLost, ProtocolError
from commlib.messaging.endpoint import Endpoint
from commlib.transports.process_group.algorithms.steps import Free, Recv, Schedule, Send

from .collective_io import Going
from .work import CollectiveWork

_log = logging.getLogger("commlib")
_LOOK_S = 0.25  # so long a call may lie there whose caller said that it would wait, and does not
GLANCE_S = 0.05  # to hear of who is gone, while nobody else reads
_SPARE = 2  # threads that serve and wait for calls; more of them end


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """Collective of this rank, waiting or under way.

    Args:
        work: what the caller waits for.
        schedule: what to do.
        done: called once that is through, before the work ends.
        timeout: seconds, from its beginning.
    """

    work: CollectiveWork
    schedule: Schedule
    done: Callable[[], None]
    timeout: float


class Engine:
    """Engine of one process group, which carries out its calls in order.

    Args:
        endpoint: connected to all others of the group, and used by nobody else.
        name: of the group.
        begin_roll_call: says after a failure that this rank is still there.
        roll_call: says then who is, in words.
    """

    def __init__(
        self, endpoint: Endpoint, name: str, begin_roll_call: Callable[[], None], roll_call: Callable[[], str]
    ) -> None:
        self._endpoint, self._name = endpoint, name
        self._begin_roll_call, self._roll_call = begin_roll_call, roll_call
        self._lock = threading.Lock()
        self._work, self._ended = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queue: collections.deque[EngineCall] = collections.deque()
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._count = 0
        self._idle = 0  # threads that serve, and wait for a call
        self._threads: set[threading.Thread] = set()
        with self._lock:
            self._another()

    @property
    def count(self) -> int:
        """Calls that have begun."""
        return self._count

    def submit(self, call: EngineCall, *, waited_for: bool = False) -> CollectiveWork:
        """Puts a call behind those before it. After a failure it fails at once, and for the same reason.

        Args:
            call: to carry out.
            waited_for: its caller is about to wait for it, and so carries it out: the thread need not be woken.
        """
        with self._lock:
            error = self._error
            if error is None:
                self._queue.append(call)
                if not waited_for:
                    self._work.notify()
        if error is not None:
            call.work.end(error)
        return call.work

    def help(self, work: CollectiveWork) -> None:
        """Carries out calls up to this one, if no other thread does; else waits for that to come to something."""
        with self._lock:
            if work.is_completed():
                return
            if self._busy or not self._queue:
                self._ended.wait()
                return
            call = self._begin()
        self._carry_out(call)

    def gone(self) -> dict[int, str]:
        """Peers that are gone, as far as that is known, and why; what this group failed by may not know that."""
        try:
            return self._endpoint.gone(GLANCE_S)
        except CommlibError:
            return {}

    def close(self, error: BaseException) -> None:
        """Fail with ``error`` all that is not through. The endpoint is the caller's to close, after this."""
        with self._lock:
            self._closed = True
            self._error = self._error or error
            left, self._queue = list(self._queue), collections.deque()
            self._work.notify()
        for call in left:
            call.work.end(error)
        with self._lock:
            self._ended.notify_all()

    def join(self, seconds: float) -> None:
        """Waits for the threads to end, so many seconds in all."""
        end = time.monotonic() + seconds
        for thread in self._threads - {threading.current_thread()}:
            thread.join(max(0.0, end - time.monotonic()))

    # -- whose turn it is -----------------------------------------------------------------------

    def _another(self) -> None:
        """Begin another thread that serves."""
        self._idle += 1
        self._threads = {t for t in self._threads if t.is_alive()}
        thread = threading.Thread(target=self._serve, name=f"commlib-zmq-{self._name}", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not self._closed and (self._busy or not self._queue):
                    self._work.wait(_LOOK_S)
                self._idle -= 1
                if self._closed:
                    return
                call = self._begin()
            self._carry_out(call)
            del call  # or it would keep what that filled until the next one comes
            with self._lock:
                if self._idle >= _SPARE:
                    return
                self._idle += 1

    def _begin(self) -> EngineCall:
        self._busy = True
        self._count += 1
        return self._queue.popleft()

    def _carry_out(self, call: EngineCall) -> None:
        error: BaseException | None = None
        try:
            self._run(call)
            call.done()
        except BaseException as e:
            error = self._gone(call, e)
        with self._lock:
            self._busy = False
            left: list[EngineCall] = []
            if error is not None:
                self._error = self._error or error
                left, self._queue = list(self._queue), collections.deque()
        told = [tell for each in (call, *left) if (tell := each.work.ended(error)) is not None]
        with self._lock:
            self._ended.notify_all()
            if self._queue:
                self._work.notify()
            if told and not self._idle and not self._closed:
                self._another()
        for tell in told:
            tell()

    # -- one call -------------------------------------------------------------------------------

    def _run(self, call: EngineCall) -> None:
        going = Going(self._endpoint, call.work.what, self._count, time.monotonic() + call.timeout)
        answer: Tensor | None = None
        while True:
            try:
                step = call.schedule.send(answer)
            except StopIteration:
                break
            answer = None
            if isinstance(step, Send):
                going.send(step)
            elif isinstance(step, Recv):
                answer = going.receive(step)
            else:
                assert isinstance(step, Free)
                going.free()
        going.free()

    def _gone(self, call: EngineCall, error: BaseException) -> BaseException:
        """The group is of no more use: tells the others, and returns the error, which says what it ended, and who is
        missing."""
        if self._closed and self._error is not None:
            return self._error
        where = f"group {self._name!r}, call {self._count}, {call.work.what}, {call.timeout:g} s"
        self._begin_roll_call()  # to tell the others takes a while where one of them is gone; they would miss this rank
        self._endpoint.abort(f"{error} ({where})")
        if not isinstance(error, CommlibError):
            return error
        _log.warning("%s (%s); asking which ranks are still there", error, where)  # torchrun may end this one soon
        kind = type(error) if isinstance(error, (PeerLost, ProtocolError)) else CommlibError
        named = kind(f"{error} ({where}; {self._roll_call()})")
        if isinstance(named, PeerLost):
            named.roll_called = True
        named.__cause__ = error
        return named
