"""Where ranks post their figures and rank 0 its decisions: the process group's store.

Every rank comes to review n after the same exchange. It posts, and waits for the decision; rank 0 waits for all
posts, and publishes. So nobody waits for a rank that waits for him; each wait has a deadline and names who is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack

from commlib.errors import PeerLost
from commlib.groups.handshake import named, wait_for, wait_for_all, within
from commlib.groups.store import store_of
from commlib.groups.world import World

_LOST = "lost"
_GRACE = 2.0  # seconds


class Coordinator:
    """The reviews of one attached model.

    Args:
        group: process group, whose store is used.
        key: prefix of its keys, one for each attached model.
        world: this rank.
        timeout: seconds to wait for the others.
    """

    def __init__(self, group: Any, key: str, world: World, timeout: float) -> None:
        self._group, self._key, self._world, self._timeout = group, key, world, timeout
        self._store = store_of(group).within(timeout)
        self._count = 0

    def review(
        self, mine: Mapping[str, Any], decide: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The next review.

        Args:
            mine: this rank's figures.
            decide: called on rank 0 with all ranks' figures.

        Returns:
            Rank 0's decision.

        Raises:
            PeerLost: a rank did not post, or rank 0 did not decide, in time.
            StoreSilent: the store does not answer.
        """
        place = f"{self._key}/review/{self._count}"
        self._store.set(f"{place}/{self._world.rank}", msgpack.packb(dict(mine)))
        if self._world.rank == 0:
            missing = wait_for_all(self._store, place, self._world, self._timeout, self._group)
            if missing:
                why = within(self._group, missing, self._timeout)
                lost = f"review {self._count}: no figures of {named(missing)} {why}"
                self._store.set(f"{place}/decision", msgpack.packb({_LOST: lost}))
                raise PeerLost(lost)
            posts = [msgpack.unpackb(self._store.get(f"{place}/{r}")) for r in range(self._world.size)]
            self._store.set(f"{place}/decision", msgpack.packb(dict(decide(posts))))
        # Rank 0 may have begun to wait for a missing rank later than this one: it shall be heard.
        if wait_for(self._store, {0: f"{place}/decision"}, self._timeout + _GRACE, self._group):
            raise PeerLost(
                f"review {self._count}: rank 0 has not decided {within(self._group, [0], self._timeout)} (this is "
                f"rank {self._world.rank} of {self._world.size})"
            )
        decision: dict[str, Any] = msgpack.unpackb(self._store.get(f"{place}/decision"))
        if _LOST in decision:
            raise PeerLost(decision[_LOST])
        self._forget(self._count - 1)
        self._count += 1
        return decision

    def _forget(self, count: int) -> None:
        """Everybody has read review n − 1 when he has posted for review n, and this one is decided."""
        if count >= 0:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can delete
                self._store.delete_key(f"{self._key}/review/{count}/{self._world.rank}")
                if self._world.rank == 0:
                    self._store.delete_key(f"{self._key}/review/{count}/decision")
