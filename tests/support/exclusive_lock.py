"""Several tests at a time, but one that measures the machine (marked ``alone``) has it to itself.

A turnstile and a room. Every test passes the turnstile into the room, which holds any number of tests or one that is
alone. That one stays in the turnstile until the room is empty, so that the others cannot keep it waiting for ever. Both
are locks of the operating system on what is there anyway: no worker that dies leaves one behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Hashable, Iterator, Sequence
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


def shares(tests: Sequence[T], alone: Sequence[Hashable | None], long: Sequence[bool], workers: int) -> list[T]:
    """An order in which workers waste no time on each other, each of whom begins with an equal share of the list.

    Those that are alone come first in every share: while one runs, nobody waits for him who has something else to do.
    Then come long ones, so that no worker has one left when the others have nothing to do any more.

    Args:
        tests: in any order.
        alone: of each the module, if it is to be alone; one module's stay together.
        long: of each whether it takes minutes.
        workers: how many.
    """
    apart: list[list[T]] = [[] for _ in range(workers)]
    for module in dict.fromkeys(m for m in alone if m is not None):
        min(apart, key=len).extend(t for t, m in zip(tests, alone, strict=True) if m == module)
    rest = [(t, is_long) for t, m, is_long in zip(tests, alone, long, strict=True) if m is None]
    for n, t in enumerate(t for t, is_long in rest if is_long):
        apart[n % workers].append(t)
    others = [t for t, is_long in rest if not is_long]
    order: list[T] = []
    for i, first in enumerate(apart):
        least = (len(tests) - len(order)) // (workers - i)
        more = others[: max(0, least - len(first))] if i < workers - 1 else others
        others = others[len(more) :]
        order += first + more
    return order
