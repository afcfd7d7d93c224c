"""Which buckets may leave: those whose gradients are all there, and those before them.

Ordering: a bucket leaves only behind all those before it, whatever the order in which gradients come. So every rank
asks its process group for the same buckets in the same order, even if a gradient is missing on one of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from commlib.errors import CommlibError


class Arrivals:
    """Of one step, until :meth:`reset`.

    Args:
        buckets: names of parameters.
    """

    def __init__(self, buckets: Sequence[Sequence[str]]) -> None:
        self._all = [frozenset(names) for names in buckets]
        self._of = {name: i for i, names in enumerate(buckets) for name in names}
        self.reset()

    def reset(self) -> None:
        """The next step."""
        self._missing = [set(names) for names in self._all]
        self._next = 0

    def came(self, name: str) -> range:
        """The buckets that may leave now that this gradient is there.

        Raises:
            CommlibError: its bucket has left in this step.
        """
        bucket = self._of[name]
        if bucket < self._next:
            raise CommlibError(
                f"a gradient of {name} came after its bucket had left: after a backward pass comes step(), and all "
                "passes of a step but the last go into no_sync()"
            )
        self._missing[bucket].discard(name)
        first = self._next
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._next += 1
        return range(first, self._next)

    def rest(self) -> range:
        """Those that have not left: the step ends, and what is missing does not come."""
        first, self._next = self._next, len(self._missing)
        return range(first, self._next)


class Receiver(Protocol):
    """Who is told of gradients (:class:`commlib.ShardedStep`)."""

    def arrived(self, name: str) -> None:
        """One is there."""


def hook_of(receiver: Receiver, name: str) -> Callable[[Tensor], None]:
    """A hook on a parameter that tells of its gradient, and does not keep the receiver alive."""
    who = weakref.ref(receiver)

    def hook(_: Tensor) -> None:
        alive = who()
        if alive is not None:
            alive.arrived(name)

    return hook
