"""Version bookkeeping of a shard: which pushes are applied, which is next, who may read. A pure state machine.

A worker at clock c that reads needs every update stamped ≤ c − s − 1, and all of its own; others' may be in it up to
stamp c + s. With s = 0 (BSP) the pushes of a step are applied as one, in the order of workers, once all are there: so a
read at c has exactly those stamped ≤ c − 1, and the result is the same whatever came first.

:class:`VersionLedger` is what a shard keeps for a range of keys; :func:`fresh` is the one rule by which it answers
reads, and by which a worker takes what it has cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from commlib.errors import ProtocolError
from commlib.server.job.consistency import Threshold

T = TypeVar("T")


def fresh(included: Mapping[int, int], worker: int, clock: int, staleness: int | None, *, own: bool = True) -> bool:
    """Whether values that include so many steps of each worker will do for this one at its clock.

    Args:
        included: worker → updates of its that are in the values: those stamped less.
        worker: who reads.
        clock: its.
        staleness: s; None: no bound.
        own: all that it has pushed itself must be in (read-my-writes).
    """
    if own and included.get(worker, 0) < clock:
        return False
    return staleness is None or all(n >= clock - staleness for w, n in included.items() if w != worker)


class VersionLedger(Generic[T]):
    """Versions of a range of keys: whose pushes are in, and which are to be applied next.

    Args:
        workers: those that push.
        threshold: the server's.
        group: worker → its group. The threshold holds among the workers of one; default: all are of the same.
    """

    def __init__(
        self, workers: Iterable[int], threshold: Threshold, group: Callable[[int], int] = lambda worker: 0
    ) -> None:
        self._threshold, self._group = threshold, group
        self._applied = dict.fromkeys(sorted(workers), 0)
        self._held: dict[tuple[int, int], dict[int, T]] = {}  # group, stamp → worker → a push that waits for others'
        self.furthest = 0
        """The highest clock that any worker has had, gone ones too: one that comes may begin there."""

    @property
    def included(self) -> Mapping[int, int]:
        """Worker → its updates that are in the values."""
        return self._applied

    def due(self, worker: int) -> int:
        """The stamp of a worker's next push."""
        clock = self._known(worker)
        return clock + sum(worker in pushes for (_, stamp), pushes in self._held.items() if stamp >= clock)

    def push(self, worker: int, stamp: int, value: T) -> list[dict[int, T]]:
        """Values to be applied now, each as one: worker → value, in the order of workers. A repeated push: none.

        Raises:
            ProtocolError: no worker of these, or one before this is missing.
        """
        due = self.due(worker)
        if stamp > due:
            raise ProtocolError(f"worker {worker} pushes step {stamp}, and its step {due} has not come")
        if stamp < due:
            return []
        self.furthest = max(self.furthest, stamp + 1)
        if self._threshold.value == 0:
            self._held.setdefault((self._group(worker), stamp), {})[worker] = value
            return self._together()
        self._applied[worker] += 1
        return [{worker: value}]

    def may_read(self, worker: int, clock: int, within: int | None = None) -> bool:
        """Whether a worker at this clock may read now; ``within``: with a bound of its own, if that is tighter."""
        self._known(worker)
        if not fresh(self.peers(worker), worker, clock, self._threshold.value):
            return False
        return within is None or fresh(self._applied, worker, clock, within)

    def peers(self, worker: int) -> Mapping[int, int]:
        """Workers of a worker's group, itself among them, as :attr:`included` has them."""
        return {w: n for w, n in self._applied.items() if self._group(w) == self._group(worker)}

    def join(self, worker: int, clock: int) -> list[dict[int, T]]:
        """A worker comes, or comes back, and begins with this step; returns what is to be applied now.

        Nobody waits for it before: those that did, since this ledger never knew it gone, have waited long enough.

        Args:
            worker: who.
            clock: at least what was due of it when it left.
        """
        self.furthest = max(self.furthest, clock)
        self._applied = dict(sorted({**self._applied, worker: clock}.items()))
        return self._together()

    def leave(self, worker: int) -> list[dict[int, T]]:
        """A worker is gone; returns what is to be applied without it. What it pushed before counts."""
        self._known(worker)
        del self._applied[worker]
        return self._together()

    def follow(self, stamps: Mapping[int, int]) -> None:
        """Another ledger has had these applied as one, and this one is its copy."""
        self._applied.update({worker: stamp + 1 for worker, stamp in stamps.items() if worker in self._applied})
        self.furthest = max(self.furthest, *(stamp + 1 for stamp in stamps.values()))

    def state_dict(self) -> dict[str, Any]:
        """Counts of the pushes that are in the values. Not of those held: who pushed them has no answer yet."""
        return {"included": dict(self._applied), "furthest": self.furthest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As a ledger was whose values these are, with its workers."""
        self._applied, self._held, self.furthest = dict(state["included"]), {}, state["furthest"]

    def _together(self) -> list[dict[int, T]]:
        """The held steps to which all of their group have pushed who had begun by then, in order."""
        ready, stuck = [], set()
        for group, stamp in sorted(self._held):
            due = [w for w, clock in self._applied.items() if self._group(w) == group and clock <= stamp]
            if group in stuck or not all(worker in self._held[group, stamp] for worker in due):
                stuck.add(group)
                continue
            self._applied.update(dict.fromkeys(due, stamp + 1))
            ready.append(dict(sorted(self._held.pop((group, stamp)).items())))
        return ready

    def _known(self, worker: int) -> int:
        if worker not in self._applied:
            raise ProtocolError(f"no worker {worker} (known: {', '.join(map(str, self._applied)) or 'none'})")
        return self._applied[worker]
