"""Threads that wait for what comes to one place take turns at reading there: there is no thread for it alone.

Whoever waits while nobody reads does so, and hands what comes to those whom it is for. A message is read by the thread
that wants it, as a rule: none is woken to wake another, which takes longer than a small message does.

Ordering: ``deliver`` is called under :attr:`Turns.lock`, by one thread at a time, in the order in which things came; so
state that only it and ``ready`` touch needs no lock besides. ``read`` is called without the lock, by one thread at a
time: senders, who hold other locks, never wait for a reader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

A = TypeVar("A")
T = TypeVar("T")

_SLICE_S = 0.1  # so long one reads before it looks around: whether all is closed, or its own deadline over


class SharedReader(Generic[A]):
    """Reader that waiting threads share: one reads and hands the others theirs.

    Args:
        read: what has come, waiting for so many seconds at most; nothing, if nothing has.
        deliver: hands it out.
        clock: seconds, as deadlines are given in.
    """

    def __init__(
        self,
        read: Callable[[float], Iterable[A]],
        deliver: Callable[[A], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._deliver, self._clock = read, deliver, clock
        self.lock = threading.Condition()
        self._reading = False

    def wait(self, ready: Callable[[], T | None], deadline: float) -> T | None:
        """Result of ``ready``, under the lock; None if that is nothing until the deadline (by ``clock``).

        What ``ready``, ``read`` or ``deliver`` raises goes through; another thread's turn comes then.
        """
        with self.lock:
            while True:
                found = ready()
                if found is not None:
                    return found
                left = deadline - self._clock()
                if left <= 0:
                    return None
                if self._reading:
                    self.lock.wait(left)
                else:
                    self._turn(min(left, _SLICE_S))

    def _turn(self, seconds: float) -> None:
        """Reads once. The lock is held before and after, and not meanwhile."""
        self._reading = True
        self.lock.release()
        try:
            came = self._read(seconds)
        finally:
            self.lock.acquire()
            self._reading = False
            self.lock.notify_all()
        for each in came:
            self._deliver(each)

    def end(self, timeout: float) -> bool:
        """Stays until nobody reads, and lets nobody else. Returns whether that was so within as many seconds."""
        with self.lock:
            ended = self.lock.wait_for(lambda: not self._reading, timeout)
            self._reading = True
            return ended
