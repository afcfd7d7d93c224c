"""Messages of workers and shards. Each belongs to the view in which its sender was."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from commlib.codecs.filter import Content


@dataclasses.dataclass(frozen=True)
class Start:
    """Values of a key, (n,), before any push."""

    view: int
    key: str
    values: Tensor


@dataclasses.dataclass(frozen=True)
class Push:
    """A worker's gradient of a key, (n,), as it is or coded, or None: it has none in this step.

    ``options`` are the optimizer's, where they are others than it was made with; ``absent`` are the parameters in it,
    by their place, that have no gradient while others have.
    """

    view: int
    key: str
    worker: int
    stamp: int
    gradient: Tensor | Content | None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    absent: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Ack:
    """A push is in the values of all who keep the key; or was refused, for it was not finite."""

    view: int
    key: str
    worker: int
    stamp: int
    refused: bool = False


@dataclasses.dataclass(frozen=True)
class Pull:
    """A worker asks for a key's values; with ``within``, for such as no worker's push is further behind.

    ``have`` is the number of the answer that it had last; None: it wants the values as they are.
    """

    view: int
    key: str
    worker: int
    clock: int
    within: int | None = None
    have: int | None = None


@dataclasses.dataclass(frozen=True)
class Values:
    """They are, (n,), new enough for this question, and include so many pushes of each worker.

    They come as they are, or as the difference to those that the worker has. ``serial`` is this answer's number.
    """

    view: int
    key: str
    worker: int
    clock: int
    values: Tensor | Content
    included: Mapping[int, int]
    within: int | None = None
    have: int | None = None
    serial: int = 0


@dataclasses.dataclass(frozen=True)
class Unknown:
    """A push of this worker has a signature of keys that are not known here."""

    view: int
    key: str
    worker: int
    signature: bytes


@dataclasses.dataclass(frozen=True)
class Keys:
    """Key list that belongs to a signature the receiver did not know: int64 (n,)."""

    view: int
    key: str
    worker: int
    signature: bytes
    keys: Tensor


@dataclasses.dataclass(frozen=True)
class Replicate:
    """An owner's update, for a replica."""

    view: int
    key: str
    applied: Applied


@dataclasses.dataclass(frozen=True)
class Adopt:
    """All that an owner knows of a key, for a replica."""

    view: int
    key: str
    state: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A replica has the first so many updates of a key."""

    view: int
    key: str
    number: int
    shard: str


@dataclasses.dataclass(frozen=True)
class Moved:
    """How far a follower's values, (n,), have gone (:class:`~commlib.server.shard.group_sync.Delta`); ``key`` is the
    master's."""

    view: int
    key: str
    group: int
    serial: int
    values: Tensor
    clock: int
    wait: int | None = None


@dataclasses.dataclass(frozen=True)
class Agreed:
    """The master's values, (n,), for the follower's ``key``, with the first ``have`` of what it has told in them."""

    view: int
    key: str
    serial: int
    have: int
    values: Tensor


@dataclasses.dataclass(frozen=True)
class Observe:
    """Result of an evaluation: accuracy or loss, for rules that follow the learning."""

    view: int
    worker: int
    metric: float


@dataclasses.dataclass(frozen=True)
class Complaint:
    """Complaint of a shard: what it got of this rank makes no sense; why."""

    view: int
    why: str


Message = (
    Start
    | Push
    | Unknown
    | Keys
    | Ack
    | Pull
    | Values
    | Replicate
    | Adopt
    | Replicated
    | Moved
    | Agreed
    | Observe
    | Complaint
)
Send = tuple[str | int, Message]
"""To a shard, by name, or to a worker, by rank."""


@dataclasses.dataclass(frozen=True)
class Applied:
    """Update that went into the values as one.

    Args:
        number: 0, 1, … of the cell's.
        stamps: worker → stamp of its push.
        gradient: (n,), as the optimizer got it; None if there was none in these pushes, or they were refused.
        refused: workers whose push was not finite.
        options: of the optimizer, where they are others than it was made with: its ``lr`` by now, say.
        absent: parameters (by their place in the cell) of which nobody had a gradient.
    """

    number: int
    stamps: Mapping[int, int]
    gradient: Tensor | None
    refused: frozenset[int] = frozenset()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    absent: frozenset[int] = frozenset()
