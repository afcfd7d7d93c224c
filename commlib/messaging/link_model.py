"""What the link does to a collective: α seconds, and β for every byte a rank sends. Pure."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Line:
    """Seconds of a collective: ``alpha + beta · bytes``.

    Args:
        alpha: seconds it takes without any bytes.
        beta: seconds for each byte that a rank sends.

    Raises:
        ValueError: one of them is negative or not finite.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} of a link must be a number ≥ 0, got {getattr(self, name)!r}")

    def seconds(self, sent: float) -> float:
        """Of a collective in which each rank sends so many bytes."""
        return self.alpha + self.beta * sent

    def slower(self, factor: float) -> Line:
        """So many times as slow."""
        return Line(factor * self.alpha, factor * self.beta)


@dataclasses.dataclass(frozen=True)
class Link:
    """The collectives a plan counts with, between ``world`` ranks.

    Bytes are those a rank *sends*: 2(P − 1)/P of a tensor for a ring all-reduce, P − 1 payloads for an all-gather.
    So on one link both have about the same β; their α differ.

    Args:
        world: P.
        all_reduce: of gradients.
        all_gather: of payloads.
        drag: how many times as long ranks' arithmetic takes while it is in use: transfers take of their cores.
        push_pull: of gradients to servers and back, if there are servers.

    Raises:
        ValueError: fewer than one rank; a drag below 1.
    """

    world: int
    all_reduce: Line
    all_gather: Line
    drag: float = 1.0
    push_pull: Line | None = None

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"a link joins at least one rank, got {self.world}")
        if not 1 <= self.drag < math.inf:
            raise ValueError(f"arithmetic takes at least as long while a link is in use, got a drag of {self.drag!r}")

    @classmethod
    def ring(cls, world: int, gbit_s: float, latency_s: float) -> Link:
        """Of rings on full-duplex lines.

        Args:
            world: P.
            gbit_s: what a rank can send, Gbit/s.
            latency_s: of one message between neighbours.

        Raises:
            ValueError: no rank, a bandwidth that is not positive, a negative latency.
        """
        if not 0 < gbit_s < math.inf:
            raise ValueError(f"the bandwidth of a link must be more than 0 Gbit/s, got {gbit_s!r}")
        if not 0 <= latency_s < math.inf:
            raise ValueError(f"the latency of a link must be a number of seconds ≥ 0, got {latency_s!r}")
        if world < 1:
            raise ValueError(f"a link joins at least one rank, got {world}")
        beta = 8 / (gbit_s * 1e9)
        return cls(world, Line(2 * (world - 1) * latency_s, beta), Line((world - 1) * latency_s, beta))

    def slower(self, factor: float) -> Link:
        """With every time of a transfer so many times as long."""
        reduce, gather = (x.slower(factor) for x in (self.all_reduce, self.all_gather))
        servers = self.push_pull and self.push_pull.slower(factor)
        return dataclasses.replace(self, all_reduce=reduce, all_gather=gather, push_pull=servers)

    @property
    def least_beta(self) -> float:
        """Of its lines."""
        return min(x.beta for x in (self.all_reduce, self.all_gather, self.push_pull) if x is not None)
