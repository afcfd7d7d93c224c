"""Which message is for which receive: by sender and tag, in order. Pure."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

M = TypeVar("M")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Wanted(Generic[T]):
    """A receive.

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
        """Whose the message is, or None: then it waits."""
        for i, wanted in enumerate(self._wanted):
            if wanted.takes(source, tag):
                del self._wanted[i]
                return wanted.ticket
        self._came.append((source, tag, message))
        return None

    def forget(self, ticket: T) -> None:
        """It waits no more."""
        self._wanted = [w for w in self._wanted if w.ticket is not ticket]
