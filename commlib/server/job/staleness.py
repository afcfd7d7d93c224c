"""Staleness: the contract of a consistency model, and its bound. The models are in
:mod:`commlib.server.job.consistency`."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol


class Threshold(Protocol):
    """s as it is now, or None for no bound."""

    @property
    def value(self) -> int | None:
        """Steps that a worker may be ahead of the slowest."""

    def observe(self, metric: float) -> None:
        """Takes note of an evaluation's result."""

    def state_dict(self) -> dict[str, Any]:
        """Lessons from the results so far: plain numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave."""


@dataclasses.dataclass
class Fixed:
    """The same throughout."""

    value: int | None

    def observe(self, metric: float) -> None:
        """Ignore the metric: the threshold is fixed."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Consistency(ABC):
    """A configuration; :meth:`threshold` makes its state.

    Attributes:
        name: what a spec string calls it.
        first: the option that ``name:value`` means.
        push_every, fetch_every: steps of a worker between two pushes, and two reads.
        depth: steps of a worker that are under way at once (a pipeline's).
        lag: seconds after which a push is too old to be applied; None: never.
    """

    name: ClassVar[str]
    first: ClassVar[str] = ""

    @property
    def push_every(self) -> int:
        return 1

    @property
    def fetch_every(self) -> int:
        return 1

    @property
    def depth(self) -> int:
        return 1

    @property
    def lag(self) -> float | None:
        return None

    @property
    def server_groups(self) -> int:
        """Groups of shards that have all values each (:mod:`commlib.topology`)."""
        return 1

    @property
    def shards(self) -> int | None:
        """How many there are to be; None: any number."""
        return None

    def group(self, worker: int) -> int:
        """Which group a worker is of: the rule holds among those of a group, and others are not waited for."""
        return 0

    def server_group(self, worker: int) -> int:
        """Which group of shards a worker pushes to."""
        return 0

    def misfit(self, workers: int, shards: int, copies: int) -> str | None:
        """Why so many cannot follow it; None: they can."""
        return None

    @abstractmethod
    def threshold(self) -> Threshold:
        """Make the threshold of one server."""

    def __str__(self) -> str:
        """As :func:`make` reads it, with every option."""
        options = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        told = ",".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in options)
        return f"{self.name}:{told}" if told else self.name


def at_least(what: str, value: int, least: int) -> None:
    """That an option is no less.

    Raises:
        ValueError: it is.
    """
    if value < least:
        raise ValueError(f"{what} must be {least} or more, got {value}")
