"""End of the interpreter: what is still alive then is closed before it, so that its threads end as a process should.

A thread that wants the interpreter's lock once the interpreter is being taken down is ended by Python in the middle of
C++ code, which takes the process with it: ``terminate called without an active exception``, exit code −6, and whoever
started it calls the training failed. Our own threads are joined here. A backend's cannot be: Gloo's let go of a
collective's last references, some of which are Python's, moments after its result is there. They get a while for it,
and on a busy machine, where one of them waits for a core, a longer one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_WHILE_S = 0.1  # they need some microseconds
_AT_MOST_S = 2.0  # as long as one of them still waits for a core
_log = logging.getLogger("commlib")
_open: dict[int, Callable[[], object]] = {}
os.register_at_fork(after_in_child=_open.clear)  # what is its parent's is not for a forked process to close


class Close(Protocol):
    """Function that ends threads; with ``wait`` it stays until they have ended."""

    def __call__(self, *, wait: bool) -> object: ...


def close_at_exit(owner: object, close: Close) -> None:
    """Close what belongs to an owner when that is gone, without waiting, or before the interpreter ends, waiting.

    Args:
        owner: it is not kept alive.
        close: called once or, if the owner outlives the interpreter's end, by that alone. Nor may it refer to the
            owner.
    """
    _end_in_order()
    key = id(close)
    _open[key] = functools.partial(close, wait=True)
    weakref.finalize(owner, _gone, key, close).atexit = False


def failing() -> bool:
    """Whether a process that is at its end, ends by an error that nobody has caught: then nothing may hold it up long.

    Of no meaning before the end: an interactive session goes on after such errors.
    """
    return hasattr(sys, "last_value")


def _gone(key: int, close: Close) -> None:
    if _open.pop(key, None) is not None:
        close(wait=False)


@functools.cache
def _end_in_order() -> None:
    """Register the end, once, and late: what is registered last is called first, before a transport is taken down."""
    atexit.register(_end)


def _end() -> None:
    while _open:
        _, close = _open.popitem()
        try:
            close()
        except Exception:
            _log.warning("something was not closed at the end of the process", exc_info=True)
    until = time.monotonic() + _AT_MOST_S
    time.sleep(_WHILE_S)
    while _others_want_a_core() and time.monotonic() < until:
        time.sleep(0.01)


def _others_want_a_core() -> bool:
    """Whether any thread of this process but this one runs or would; where the kernel does not tell, none does."""
    mine = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if task.name != mine and (task / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False
