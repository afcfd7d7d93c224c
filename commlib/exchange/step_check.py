"""Comparison of how many steps ranks have taken: seeds of random codecs, warm-ups and dense steps follow from that.

Each rank counts for itself. Two counts that differ would leave replicas that differ, without a word. A count is right
as long as every rank takes every step; it goes wrong where one rank alone loads a state, has none to load, or discards
a step. So a rank whose count was changed asks before its next exchange.

Order. A rank asks before it issues anything of that exchange, so the exchange cannot end on any other rank. Each of
them comes to this exchange, too, and either asks by itself, or issues its part and waits: and while it waits it looks
every half second whether somebody has asked (:meth:`StepCheck.answer`). Whoever asks or answers says first what it has
and then waits for the others' words; these come before any wait. So all hear all, and there is no cycle. Exchanges are
numbered from attaching, whatever counts as a step: a question and its answers meet in the same one.

Ranks that differ go through with this exchange nevertheless, and raise the error behind it: a collective that only some
have issued would be met by whatever the program does next. If it does not come through, for their collectives differ,
too, they wait :data:`PATIENCE_S` for it and no longer.

Over NCCL the host does not wait, and does not look: a rank that asks alone is told so at the deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from commlib.errors import PeerLost, PlanMismatch
from commlib.groups.handshake import ROLL_CALL_S, difference, named, peers_gone, wait_for_all, within
from commlib.groups.store import store_of
from commlib.groups.world import World
from commlib.runtime.autograd import LOOK_S

PATIENCE_S = 5.0
"""Seconds that an exchange may take yet, when it is known that ranks differ."""

_MEND = (
    "What a step sends follows from its number: load states of the same step, on all ranks or on none, and call "
    "discard_step() on all"
)


class StepCheck:
    """The comparisons of one attached model over one process group.

    Args:
        group: process group.
        key: prefix of its keys, one for each attached model.
        world: this rank.
        timeout: seconds to wait for the others: as long as a collective may take.

    Attributes:
        found: the error, once ranks are known to differ; to be raised behind the exchange.
    """

    def __init__(self, group: Any, key: str, world: World, timeout: float) -> None:
        self._group, self._key, self._world, self._timeout = group, key, world, timeout
        self._number = self._said = 0
        self._mine: Mapping[str, str] = {}
        self._since = 0.0
        self.found: PlanMismatch | None = None

    def begin(self, number: int, mine: Mapping[str, str], doing: str, why: str, meanwhile: Callable[[], None]) -> None:
        """Ask before an exchange, of which nothing is issued yet.

        Args:
            number: of the exchange, from 1, since the model was attached.
            mine: what must be the same on all ranks, by name: the count of steps.
            doing: what is exchanged, for errors: "exchange buckets of step 3".
            why: what this rank has done, for which they are compared.
            meanwhile: called every half second of a wait; it answers roll calls.

        Raises:
            PeerLost: a rank did not come.
            StoreSilent: the store does not answer.
        """
        self._number, self._mine = number, mine
        if self._world.size > 1:
            store_of(self._group).set(self._at("asked"), b"")
            self._compare(doing, why, meanwhile)

    def answer(self, number: int, mine: Mapping[str, str], doing: str, meanwhile: Callable[[], None]) -> None:
        """The same comparison, if another rank has asked; called while this one waits in an exchange.

        Raises:
            PlanMismatch: ranks differ, and the exchange does not come through either.
            PeerLost, StoreSilent: as :meth:`begin`.
        """
        if self.found is not None and time.monotonic() > self._since + PATIENCE_S:
            raise self.found
        if self._said == number or self._world.size == 1:
            return
        self._number, self._mine, asked = number, mine, False
        with contextlib.suppress(Exception):  # the store may be gone; the exchange itself will tell
            asked = store_of(self._group).within(ROLL_CALL_S).check([self._at("asked")])
        if asked:
            self._compare(doing, "", meanwhile)

    def _compare(self, doing: str, why: str, meanwhile: Callable[[], None]) -> None:
        before, self._said = self._said, self._number
        store, rank, size = store_of(self._group), self._world.rank, self._world.size
        store.set(f"{self._at('said')}/{rank}", msgpack.packb([self._mine, why]))
        end = time.monotonic() + self._timeout
        while missing := wait_for_all(store, self._at("said"), self._world, LOOK_S, self._group):
            if time.monotonic() > end or peers_gone(self._group).keys() & set(missing):
                raise PeerLost(
                    f"rank {rank} of {size} could not {doing}: {named(missing)} did not answer "
                    f"{within(self._group, missing, self._timeout)} (steps are compared first: rank {rank} "
                    f"{why or 'was asked to'})"
                )
            meanwhile()
        said = [msgpack.unpackb(store.get(f"{self._at('said')}/{r}")) for r in range(size)]
        for other, (theirs, _) in enumerate(said):
            if theirs != self._mine:
                words = f"ranks are at different steps: {difference(self._mine, theirs, rank, other)}"
                did = "; ".join(f"rank {r} {why}" for r, (_, why) in enumerate(said) if why)
                self.found, self._since = PlanMismatch(f"{words} ({did}). {_MEND}"), time.monotonic()
                return
        self._forget(before)

    def _forget(self, number: int) -> None:
        """All have read the answers of a comparison when they have answered in a later one."""
        if number:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can delete
                store, place = store_of(self._group), f"{self._key}/steps/{number}"
                store.delete_key(f"{place}/said/{self._world.rank}")
                if self._world.rank == 0:
                    store.delete_key(f"{place}/asked")

    def _at(self, what: str) -> str:
        return f"{self._key}/steps/{self._number}/{what}"
