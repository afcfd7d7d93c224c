"""When a worker pushes and when it fetches: every step, or now and then, going on by itself in between. Pure.

By itself a worker takes steps of its own optimizer, with its own gradients. Of P workers each push moves the shards'
values by a P-th of such a step (as a mean), so P of them by about one: it foresees what the others do, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from commlib.server.job.consistency import Consistency
from commlib.server.job.version_ledger import fresh


class SyncPolicy:
    """Policy of one worker: in which steps it pushes, and in which it fetches.

    Args:
        rule: Downpour's ``push`` and ``fetch``, WSP's waves; others push and fetch in every step.
        worker: its number.
        cache: values are fetched only when those that are here are too old for the rule (SSP's process cache: Ho et
            al., NIPS 2013, section 3).

    Raises:
        ValueError: a cache where no values are ever too old.
    """

    def __init__(self, rule: Consistency, worker: int = 0, *, cache: bool = False) -> None:
        self._rule, self._worker, self._step = rule, worker, 0
        self._bound = rule.threshold().value
        if cache and self._bound is None:
            raise ValueError(f"with {rule} no values are too old for a cache: downpour:fetch=N fetches now and then")
        self._cache = cache and bool(self._bound)  # in bulk all values are too old
        self._included: dict[str, Mapping[int, int]] = {}

    @property
    def accrues(self) -> bool:
        """Whether gradients of several steps leave as their sum."""
        return self._rule.push_every > 1

    @property
    def alone(self) -> bool:
        """Whether there are steps after which nothing is fetched."""
        return self._cache or self._rule.fetch_every > 1

    @property
    def pushes(self) -> bool:
        """Whether gradients leave in this step."""
        return (self._step + 1) % self._rule.push_every == 0

    def fetches(self, key: str, clock: int) -> bool:
        """Whether values of a key are asked for after this step.

        Args:
            key: whose.
            clock: pushes of it, with this step's.
        """
        if (self._step + 1) % self._rule.fetch_every:
            return False
        here = self._included.get(key) if self._cache else None
        return here is None or not fresh(here, self._worker, clock, self._bound, own=False)

    def took(self, key: str, included: Mapping[int, int]) -> None:
        """Values came, with so many pushes of each worker in them."""
        self._included[key] = included

    def end_step(self) -> None:
        """The next one begins."""
        self._step += 1
