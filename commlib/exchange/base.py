"""Contract of an exchange: how the gradients of a bucket become their mean over the ranks."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.collectives import Rounds
from commlib.exchange.layer_task import LayerTask, Stripe
from commlib.groups.world import World


class Carrier(abc.ABC):
    """Base of what carries payloads, as a plan sees it. Without state: all methods are pure.

    Attributes:
        name: in a route, after the ``@``.
        ROUNDS: how many times ``rounds`` yields at most, each time the collectives that may run at once.
        PASSES: how often an uncompressed gradient goes over the link; an all-reduce sends it there and back.
    """

    name: ClassVar[str]
    ROUNDS: ClassVar[int]
    PASSES: ClassVar[int] = 2

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """Why this exchange cannot carry this codec for this layer; None if it can, as all can by default."""
        return None

    @abc.abstractmethod
    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Payload bytes that the busiest of ``world`` ranks sends in a step for this layer; NaN while unknown."""

    def owned(self, codec: Compressor, spec: LayerSpec, world: World) -> Stripe | None:
        """The stripe that this rank encodes again and keeps slots for; None, as by default, if there is none."""
        return None


class Exchange(Carrier):
    """Base of the exchanges that leave all ranks with the mean."""

    @abc.abstractmethod
    def rounds(self, items: Sequence[LayerTask], world: World, buffer: Tensor | None) -> Rounds:
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
