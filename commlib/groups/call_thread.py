"""Calls that know no deadline, in a thread of their own: whoever asks waits for the answer as long as it likes."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Job = tuple[Callable[[], Any], "Future[Any]"]


class CallThread:
    """A thread that makes calls one after another. It starts with the first, and keeps no process from ending.

    A call that never returns keeps those behind it waiting, too. The thread ends, after the calls it was given, when
    nobody refers to this any more.

    Args:
        name: of the thread, for whoever looks at a stack.
    """

    def __init__(self, name: str) -> None:
        self._name, self._started = name, False
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have it called; its result or exception is the future's."""
        future: Future[Any] = Future()
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=_make, args=(self._queue,), name=self._name, daemon=True).start()
                weakref.finalize(self, self._queue.put, None).atexit = False
        self._queue.put((call, future))
        return future


def _make(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        call, future = job
        try:
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)
        del job, call, future  # or it would keep them until the next one comes
