"""Two tests at a time, but one that measures the machine (marked ``alone``) has it to itself.

A turnstile and a room. Every test passes the turnstile into the room, which holds any number of tests or one that is
alone. That one stays in the turnstile until the room is empty, so that the others cannot keep it waiting for ever. Both
are locks of the operating system on what is there anyway: no worker that dies leaves one behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_ROOM = Path(__file__)
_TURNSTILE = _ROOM.parent


@contextlib.contextmanager
def turn(*, alone: bool) -> Iterator[None]:
    """Waits until this test may run, and holds its place among the tests of all processes that use this checkout."""
    room, turnstile = (os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in (_ROOM, _TURNSTILE))
    try:
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turnstile, fcntl.LOCK_UN)
        yield
    finally:
        os.close(turnstile)
        os.close(room)
