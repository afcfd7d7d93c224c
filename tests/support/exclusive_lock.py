"""Several tests at a time, but one that measures the machine (marked ``alone``) has it to itself.

A turnstile and a room. Every test passes the turnstile into the room, which holds any number of tests or one that is
alone. That one stays in the turnstile until the room is empty, so that the others cannot keep it waiting for ever. Both
are locks of the operating system on what is there anyway: no worker that dies leaves one behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

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


def shares(tests: Sequence[T], alone: Sequence[bool], long: Sequence[bool], workers: int) -> list[T]:
    """An order in which workers waste no time on each other, each of whom begins with an equal share of the list.

    The first worker begins with all those that are alone, one after another: the others have something to do before
    and after, and all wait once. Of these each begins with a test that is soon over. Then come long ones, so that no
    worker has one left when the others have nothing to do any more.

    Args:
        tests: in any order.
        alone: of each whether it is to be alone.
        long: of each whether it takes minutes.
        workers: how many.
    """
    kinds = list(zip(tests, alone, long, strict=True))
    minutes = [t for t, is_alone, is_long in kinds if is_long and not is_alone]
    others = [t for t, is_alone, is_long in kinds if not is_long and not is_alone]
    order: list[T] = []
    for i in range(workers):
        share = [t for t, is_alone, _ in kinds if is_alone] if i == 0 else others[:1]
        others = others[0 if i == 0 else 1 :]
        share += minutes[i::workers]
        more = max(0, (len(tests) - len(order)) // (workers - i) - len(share)) if i < workers - 1 else len(others)
        order += share + others[:more]
        others = others[more:]
    return order
