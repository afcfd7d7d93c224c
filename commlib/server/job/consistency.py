"""How far workers may run apart: the rules, and s, the steps that they may. No time, no network.

A worker's *clock* is how often it has pushed; its t-th push, from 0, is *stamped* t. A worker at clock c that reads
needs every update stamped ≤ c − s − 1 (:mod:`commlib.server.job.version_ledger`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from commlib.runtime.plugins import from_table
from commlib.server.job.staleness import Consistency, Fixed, Threshold, at_least
from commlib.server.job.worker_groups import Topology

__all__ = ["ASP", "BSP", "DTSSP", "RULES", "SSP", "WSP", "Consistency", "Downpour", "Threshold", "make"]


@dataclasses.dataclass(frozen=True)
class BSP(Consistency):
    """Bulk synchronous: nobody reads before all have pushed."""

    name = "bsp"

    def threshold(self) -> Threshold:
        return Fixed(0)


@dataclasses.dataclass(frozen=True)
class ASP(Consistency):
    """Asynchronous: nobody waits, and there is no bound."""

    name = "asp"

    def threshold(self) -> Threshold:
        return Fixed(None)


@dataclasses.dataclass(frozen=True)
class SSP(Consistency):
    """Stale synchronous parallel (Ho et al., NIPS 2013).

    Args:
        staleness: s, steps; 0 is BSP.
    """

    staleness: int = 3

    name = "ssp"
    first = "staleness"

    def __post_init__(self) -> None:
        at_least("staleness", self.staleness, 0)

    def threshold(self) -> Threshold:
        return Fixed(self.staleness)


@dataclasses.dataclass(frozen=True)
class DTSSP(Consistency):
    """SSP whose s follows the learning: up while it gains, down while it loses.

    The gain of an evaluation over the one before is (new − old)/|old| in % on accuracy, (old − new)/|old| on loss.
    Above ``limit`` s rises by one, below −``limit`` it falls by one. (The formula as printed has the loss's sign for
    accuracy, against its own prose: ``literal`` takes it at its word.) An old value of 0 says nothing of a gain.

    Args:
        least: bound of s, which begins there.
        most: the upper bound.
        limit: percent.
        on: ``accuracy`` or ``loss``: what :meth:`Threshold.observe` is told.
        literal: the printed sign.
    """

    least: int = 3
    most: int = 10
    limit: float = 5.0
    on: str = "accuracy"
    literal: bool = False

    name = "dtssp"

    def __post_init__(self) -> None:
        at_least("least", self.least, 1)
        at_least("most", self.most, self.least)
        if not self.limit >= 0:
            raise ValueError(f"dtssp: limit must be 0 % or more, got {self.limit}")
        if self.on not in ("accuracy", "loss"):
            raise ValueError(f"dtssp: on must be accuracy or loss, got {self.on!r}")

    def threshold(self) -> Threshold:
        return _Dynamic(self)


class _Dynamic:
    def __init__(self, rule: DTSSP) -> None:
        self._rule, self.value = rule, rule.least
        self._old: float | None = None
        self._up = -1 if (rule.on == "loss") != rule.literal else 1

    def observe(self, metric: float) -> None:
        """An evaluation's accuracy or loss. One that is not finite is no result, and passed over."""
        if not abs(metric) < float("inf"):
            return
        old, self._old = self._old, metric
        if not old:
            return
        gain = self._up * 100 * (metric - old) / abs(old)
        if gain > self._rule.limit:
            self.value = min(self.value + 1, self._rule.most)
        elif gain < -self._rule.limit:
            self.value = max(self.value - 1, self._rule.least)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "old": self._old}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self._old = state.get("value", self.value), state.get("old")


@dataclasses.dataclass(frozen=True)
class WSP(Consistency):
    """Wave synchronous parallel (HetPipe, USENIX ATC 2020): clocks count waves of ``local`` + 1 minibatches.

    Args:
        distance: D, waves that workers may be apart.
        local: s_local, minibatches of a virtual worker under way besides the first.
    """

    distance: int = 0
    local: int = 0

    name = "wsp"

    def __post_init__(self) -> None:
        at_least("distance", self.distance, 0)
        at_least("local", self.local, 0)

    @property
    def push_every(self) -> int:
        return self.local + 1

    @property
    def fetch_every(self) -> int:
        return self.local + 1

    @property
    def depth(self) -> int:
        return self.local + 1

    @property
    def staleness(self) -> int:
        """s_global: minibatches of another that one may miss, at most."""
        return (self.distance + 1) * (self.local + 1) + self.local - 1

    def threshold(self) -> Threshold:
        return Fixed(self.distance)


@dataclasses.dataclass(frozen=True)
class Downpour(Consistency):
    """ASP with rarer messages (Dean et al., NIPS 2012); between them a worker goes on by itself.

    Args:
        push: steps between two pushes, each of the sum since the last (n_push).
        fetch: steps between two reads (n_fetch).
        time_lag: seconds after which the server refuses a push, counted from when its values were sent to the worker
            (TensorSpark); 0: never.
    """

    push: int = 1
    fetch: int = 1
    time_lag: float = 0.0

    name = "downpour"

    def __post_init__(self) -> None:
        at_least("push", self.push, 1)
        at_least("fetch", self.fetch, 1)
        if not 0 <= self.time_lag < float("inf"):
            raise ValueError(f"downpour: time_lag must be 0 s or more, got {self.time_lag}")

    @property
    def push_every(self) -> int:
        return self.push

    @property
    def fetch_every(self) -> int:
        return self.fetch

    @property
    def lag(self) -> float | None:
        return self.time_lag or None

    def threshold(self) -> Threshold:
        return Fixed(None)


RULES: Mapping[str, type[Consistency]] = {rule.name: rule for rule in (BSP, ASP, SSP, DTSSP, WSP, Downpour, Topology)}


def make(spec: str | Consistency) -> Consistency:
    """Make a rule from ``bsp``, ``asp``, ``ssp:3``, ``dtssp:least=3,most=10``, ``wsp:distance=1,local=3``,
    ``downpour:push=5``.

    Raises:
        ValueError: an unknown rule or option, or a value out of range.
    """
    return spec if isinstance(spec, Consistency) else from_table("consistency", spec, RULES)
