"""What a worker does in an iteration, in which order: recorded once, and the same ever after, or recorded anew. Pure.

GeePS (EuroSys 2016, section 4) has an application go through one iteration that only says what it will read and update,
and works out buffers and indexes from that. Here the first iteration is a real one. One that turns out to be another is
noticed at the first operation that differs; from there on nothing is foretold until the next one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Sequence(Generic[T]):
    """Of one worker."""

    def __init__(self) -> None:
        self._known: tuple[T, ...] | None = None
        self._now: list[T] = []
        self._as_known = False

    @property
    def known(self) -> tuple[T, ...] | None:
        """The operations of an iteration, as the last one was; None: there was none yet."""
        return self._known

    @property
    def foretold(self) -> bool:
        """Whether this iteration has been the known one so far."""
        return self._as_known

    @property
    def at(self) -> int:
        """Operations of this iteration so far."""
        return len(self._now)

    def note(self, operation: T) -> bool:
        """Takes note of what is done now; whether it is what was foretold."""
        i = len(self._now)
        self._now.append(operation)
        if self._as_known:
            assert self._known is not None
            self._as_known = i < len(self._known) and self._known[i] == operation
        return self._as_known

    def end(self) -> bool:
        """The iteration is over; whether what is known is another now, and all that was worked out from it void."""
        same = self._as_known and len(self._now) == len(self._known or ())
        if not same:
            self._known = tuple(self._now)
        self._now, self._as_known = [], True
        return not same
