"""Server groups that keep the same values, each updating its own: what they tell each other. Pure: no network.

One group is a slice's *master*; the others follow it. A follower sends how far its values, cur, have gone since it last
knew the master's (Δ = cur − last), the master adds that, and answers with what it then has. After SINGA (Ooi et al.,
ACM Multimedia 2015; as its code has it), but for one rule. There, cur ← master + (cur − last) is followed by
last ← cur: so the updates that were made while the request was under way count as sent, and the master never gets them.
Here it is last ← master: what is in cur and not in master is yet to be sent. (With several under way, master is what it
will be with those that it has not got yet.)

Ordering: what one follower sends comes in its order. What was sent again counts once (``serial``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Delta:
    """Difference that a follower tells its master.

    Args:
        serial: 0, 1, … of this follower's.
        values: (n,), how far its values have gone since the one before.
        clock: updates of all that train with it, of which each is in this or in one before.
        wait: the answer is to have the first so many updates of every group in it; None: it is to come at once.
    """

    serial: int
    values: Tensor
    clock: int
    wait: int | None = None


class Follower:
    """A slice's values in a group that is not its master.

    Args:
        values: (n,), cur; whoever updates them does so in place. All groups begin with the same.
        every: updates between two Δ, and how many may be without an answer when one more is sent (SINGA's sync_freq).
    """

    def __init__(self, values: Tensor, every: int = 1) -> None:
        self.values, self._last, self._every = values, values.clone(), every
        self._updates = self._serial = self._met = 0
        self._pending: dict[int, Delta] = {}

    @property
    def pending(self) -> list[Delta]:
        """Without an answer, in order: to be sent again to a master that may not have got them."""
        return list(self._pending.values())

    def updated(self, clock: int) -> Delta | None:
        """The values have had one update more; what is to be sent, if it is time.

        Args:
            clock: as :class:`Delta` has it.
        """
        self._updates += 1
        return self.due(clock)

    def due(self, clock: int) -> Delta | None:
        """The same after an answer, when there may be room for what had to wait."""
        due = self._updates >= self._every and len(self._pending) <= self._every
        return self._tell(clock) if due else None

    def meet(self, clock: int) -> Delta | None:
        """Difference to be sent so that :meth:`met` comes true; None if it is under way, or true."""
        asked = any(delta.wait is not None and delta.wait >= clock for delta in self._pending.values())
        return None if asked or self.met(clock) else self._tell(clock, clock)

    def met(self, clock: int) -> bool:
        """Whether the values have the first so many updates of every group in them."""
        return clock <= self._met

    def answer(self, serial: int, have: int, master: Tensor) -> None:
        """The master's values have come. What was answered before changes nothing.

        Args:
            serial: of what this answers.
            have: the first so many Δ of this follower are in them.
            master: (n,), not kept.
        """
        answered = self._pending.pop(serial, None)
        if answered is None:
            return
        self._met = max(self._met, answered.wait or 0)
        there = master.clone()  # and as it will be with what is under way: nobody's own updates go away for a time
        for delta in self._pending.values():
            if delta.serial >= have:
                there.add_(delta.values)
        self.values.sub_(self._last).add_(there)  # without steps since, cur − last is zero, so the master's to the bit
        self._last.copy_(there)

    def _tell(self, clock: int, wait: int | None = None) -> Delta:
        delta = Delta(self._serial, self.values - self._last, clock, wait)
        self._last.copy_(self.values)
        self._serial, self._updates = self._serial + 1, 0
        self._pending[delta.serial] = delta
        return delta


class Master:
    """A slice's values in its master group, which updates them, too.

    Args:
        values: (n,), changed in place.
        groups: numbers of all server groups whose workers train.
    """

    def __init__(self, values: Tensor, groups: Iterable[int]) -> None:
        self.values = values
        self._clocks = dict.fromkeys(groups, 0)
        self._next: dict[int, int] = {}  # follower → the serial that is due
        self._asked: list[tuple[int, int, int | None]] = []  # group, serial, wait

    def take(self, group: int, delta: Delta) -> None:
        """A follower's Δ has come, for the first time or again; it has an answer to get (:meth:`answers`)."""
        if delta.serial >= self._next.get(group, 0):
            self.values.add_(delta.values)
            self._next[group] = delta.serial + 1
            self.reach(group, delta.clock)
        self._asked.append((group, delta.serial, delta.wait))

    def reach(self, group: int, clock: int) -> None:
        """The values have the first so many updates of a group in them."""
        if group in self._clocks:
            self._clocks[group] = max(self._clocks[group], clock)

    def keep(self, groups: Collection[int]) -> None:
        """Forget groups that have no workers any more: nothing waits for them. Followers will ask again."""
        self._clocks = {group: clock for group, clock in self._clocks.items() if group in groups}
        self._asked.clear()

    def met(self, clock: int) -> bool:
        """Whether the values have the first so many updates of every group in them."""
        return all(reached >= clock for reached in self._clocks.values())

    def answers(self) -> list[tuple[int, int, int]]:
        """(group, serial, have) of what is to be answered now with the values; each once."""
        waiting, self._asked = self._asked, []
        ready = []
        for group, serial, wait in waiting:
            if wait is None or self.met(wait):
                ready.append((group, serial, self._next[group]))
            else:
                self._asked.append((group, serial, wait))
        return ready
