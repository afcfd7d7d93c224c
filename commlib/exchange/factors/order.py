"""Order in which layers' rows leave: the same on every rank. Pure state machines.

Layers become ready in whatever order the backward pass meets them, and a layer that a rank does not use becomes ready
only when DDP asks for its bucket. On a process group of their own (:class:`StepOrder`) rows are issued in one fixed
order, each as soon as it and all before it are ready. At the end of a backward pass every layer is ready, for DDP has
asked for every bucket; so all are issued, and on every rank in the same order.

Over NCCL rows and buckets go on one communicator (:class:`InterleavedOrder`): with several in flight, ranks whose
devices take them up in different orders may wait for each other for ever. There the order of everything issued is::

    rows of bucket 0's layers, bucket 0, rows of bucket 1's layers, bucket 1, …

and within a bucket that of its parameters. DDP asks for the buckets in the same order, and with the same parameters, on
every rank. A bucket's rows are issued before it at the latest when DDP asks for it. They may be issued earlier, as soon
as the bucket before has been, each once it and those before it in its bucket are ready. When that is differs from rank
to rank; what comes before and after them does not: so every rank issues the same sequence. For that, the layers of the
next bucket must be known before DDP asks for it, and known alike: it has the buckets of the step before. DDP makes new
ones once, between its first exchange and the second; so until two exchanges in a row had the same ones, nothing is
early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from commlib.errors import CommlibError


class RowOrder(Protocol):
    """Contract of an order: each call returns the layers whose rows are to be issued now, in order."""

    def ready(self, name: str) -> list[str]:
        """All rows of a layer have come; more than once does no harm."""

    def asked(self, name: str) -> list[str]:
        """DDP asks for the bucket of a layer: what has not come until now will not."""

    def passed(self, layers: Sequence[str]) -> list[str]:
        """A bucket has been issued, with these layers whose rows leave: each where its first parameter is."""

    def restart(self, *, whole: bool) -> None:
        """The next step begins; ``whole``: the one before has asked for all of DDP's buckets, and not broken off."""


class StepOrder:
    """Order of rows on a process group of their own.

    Args:
        names: all layers, in the order in which they are issued.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._known = set(names)
        self._ready: set[str] = set()
        self._issued = 0

    def ready(self, name: str) -> list[str]:
        """Same contract as :meth:`RowOrder.ready`.

        Raises:
            KeyError: there is no such layer.
        """
        if name not in self._known:
            raise KeyError(name)
        self._ready.add(name)
        start = self._issued
        while self._issued < len(self._names) and self._names[self._issued] in self._ready:
            self._issued += 1
        return self._names[start : self._issued]

    def asked(self, name: str) -> list[str]:
        """Same contract as :meth:`RowOrder.asked`; it waits for its turn."""
        return self.ready(name)

    def passed(self, layers: Sequence[str]) -> list[str]:
        """Same contract as :meth:`RowOrder.passed`; buckets go elsewhere."""
        return []

    def restart(self, *, whole: bool) -> None:
        """Same contract as :meth:`RowOrder.restart`."""
        self._ready.clear()
        self._issued = 0


class InterleavedOrder:
    """Order of rows on the communicator of the buckets."""

    def __init__(self) -> None:
        self._ready: set[str] = set()
        self._issued: set[str] = set()
        self._buckets: list[tuple[str, ...]] = []  # of this step
        self._before: list[tuple[str, ...]] = []  # of the step before
        self._sure = False

    def ready(self, name: str) -> list[str]:
        """Same contract as :meth:`RowOrder.ready`."""
        self._ready.add(name)
        return self._early()

    def asked(self, name: str) -> list[str]:
        """Same contract as :meth:`RowOrder.asked`; at once, if it has not been issued."""
        due = self.ready(name)
        if name in self._issued:
            return due
        self._issued.add(name)
        return [*due, name]

    def passed(self, layers: Sequence[str]) -> list[str]:
        """Same contract as :meth:`RowOrder.passed`.

        Raises:
            CommlibError: the bucket is another one than in the two steps before.
        """
        turn = len(self._buckets)
        self._buckets.append(tuple(layers))
        if self._sure and self._buckets[turn:] != self._before[turn : turn + 1]:
            raise CommlibError(
                f"bucket {turn} has the layers {', '.join(layers) or '(none)'} and not, as in the two steps before, "
                f"{', '.join(next(iter(self._before[turn:]), ())) or '(none)'}: rows may have left in another order "
                'than on other ranks; use "none", or tell us what changes DDP\'s buckets'
            )
        return self._early()

    def restart(self, *, whole: bool) -> None:
        """Same contract as :meth:`RowOrder.restart`. Of what a step that broke off has shown nothing is kept; one that
        exchanged nothing changes nothing."""
        if self._buckets:
            self._sure = whole and self._buckets == self._before
            self._before = self._buckets if whole else []
        self._buckets = []
        self._ready.clear()
        self._issued.clear()

    def _early(self) -> list[str]:
        """Layers of the next bucket that need not wait for it."""
        due: list[str] = []
        turn = len(self._buckets)
        for name in self._before[turn] if self._sure and turn < len(self._before) else ():
            if name in self._issued:
                continue
            if name not in self._ready:
                break
            due.append(name)
        self._issued.update(due)
        return due
