"""Which servers sum a DDP model's gradients, as the user says it."""

from __future__ import annotations

import dataclasses

from commlib.server.membership import rendezvous

NBYTES = 512 << 10
"""Of a chunk, at most: a sum can begin to come when a chunk is there from all (docs/adr/0020-push-pull.md)."""


@dataclasses.dataclass(frozen=True)
class Servers:
    """Shards for the route ``push_pull``: of a parameter server, but they keep no model, they sum gradients.

    Args:
        at: ``HOST:PORT`` where members meet (``commlib server meet``), or ``embedded``, which starts a shard on each
            machine (``embedded:2``: two).
        shards: how many begin at least, of those that meet elsewhere; all that are there by then are used.
        copies: shards that keep each value: with 2, one may die.
        job: its name where members meet; no two runs have the same.
        patience: seconds of silence after which a member may be given up.
        nbytes: of a chunk, at most.
        endpoint: how members are reached, an entry point of ``commlib.endpoints``.

    Raises:
        ValueError: ``at`` is no address; a number that cannot be.
    """

    at: str
    shards: int = 1
    copies: int = 1
    job: str = "default"
    patience: float = 10.0
    nbytes: int = NBYTES
    endpoint: str = "zmq"

    def __post_init__(self) -> None:
        kind, _, each = self.at.partition(":")
        if kind != "embedded":
            rendezvous.parse(self.at)
        elif self.at != kind and not (each.isdecimal() and int(each)):
            raise ValueError(f"servers are 'embedded', 'embedded:N' or 'HOST:PORT', got {self.at!r}")
        for name in ("shards", "copies"):
            if getattr(self, name) < 1:
                raise ValueError(f"servers: {name} must be 1 or more, got {getattr(self, name)}")

    @classmethod
    def of(cls, given: Servers | str | None, *, limited: bool = False) -> Servers | None:
        """What the user means: servers, where they are, or None.

        Args:
            given: by the user.
            limited: whether what ranks send keeps a limit of rate.

        Raises:
            ValueError: no address; or a limit, too.
            TypeError: something else.
        """
        if given is not None and limited:
            raise ValueError("a limit paces process groups, and pushes to servers pass none: give limit or servers")
        if given is None or isinstance(given, Servers):
            return given
        if not isinstance(given, str):
            raise TypeError(f"servers are 'HOST:PORT', 'embedded' or commlib.Servers(…), got {given!r}")
        return cls(given)

    @property
    def embedded(self) -> int:
        """How many start on each machine; 0: they are elsewhere."""
        kind, _, each = self.at.partition(":")
        return int(each or 1) if kind == "embedded" else 0

    def __str__(self) -> str:
        return self.at if self.embedded else f"{self.at}, job {self.job}"
