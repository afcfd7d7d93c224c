"""The contract of an exchange, and what an exchange asks of a route."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.collectives import Rounds
from commlib.exchange.layer_task import Item, Stripe
from commlib.groups.world import World


class Carrier(Protocol):
    """What a plan asks of an exchange. All functions are pure."""

    ROUNDS: int
    """How many times ``rounds`` yields."""

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """Why it cannot carry this codec for this layer, or None."""

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Payload bytes the busiest rank sends in a step for this layer."""

    def owned(self, codec: Compressor, spec: LayerSpec, world: World) -> Stripe | None:
        """The stripe this rank re-encodes and keeps slots for, if the exchange has such."""


class Exchange(Carrier, Protocol):
    """The contract of one that leaves all ranks with the mean."""

    def rounds(self, items: Sequence[Item], world: World, buffer: Tensor | None) -> Rounds:
        """Replace each item's gradient by the mean over ranks; bitwise the same on every rank.

        Args:
            items: layers of one bucket, in the same order on every rank.
            world: this rank, and how many there are.
            buffer: the flat bucket, if the items are all of it.
        """


class Routed(Protocol):
    """A layer's route: the part of :class:`commlib.Route` that exchanges use."""

    @property
    def exchange(self) -> str:
        """Name of the exchange."""

    @property
    def codec(self) -> Compressor:
        """The codec whose payloads it carries."""

    @property
    def by_rows(self) -> bool:
        """Whether the rows that a gradient is made of travel, and not the gradient."""
