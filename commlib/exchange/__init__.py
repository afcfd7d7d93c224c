"""How a gradient travels. Each exchange is a module with the functions of :class:`Exchange`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, cast

from torch import Tensor

from commlib.collective import Rounds
from commlib.compressor import Compressor, LayerSpec
from commlib.exchange import (
    blocks,
    dense,
    factors,
    gather,
    low_rank,
    owners,
    push_pull,
    reduce_scatter,
    scatter_gather,
    sparse,
)
from commlib.exchange.item import Item, Stripe, World
from commlib.factors.sending import Sending


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


EXCHANGES: Mapping[str, Exchange] = MappingProxyType(
    {
        "dense": cast(Exchange, dense),
        "gather": cast(Exchange, gather),
        "scatter_gather": cast(Exchange, scatter_gather),
        "low_rank": cast(Exchange, low_rank),
        "blocks": cast(Exchange, blocks),
        "factors": cast(Exchange, factors),
        "owners": cast(Exchange, owners),
        "push_pull": cast(Exchange, push_pull),
        "sparse": cast(Exchange, sparse),
    }
)

CARRIERS: Mapping[str, Carrier] = MappingProxyType({**EXCHANGES, "reduce_scatter": cast(Carrier, reduce_scatter)})
"""These, and what leaves every rank with its own part of the mean (:mod:`commlib.fsdp`)."""

BY_SERVERS: frozenset[str] = frozenset({"push_pull"})
"""Exchanges that need servers."""

OF_SPARSE: frozenset[str] = frozenset({"sparse"})
"""Exchanges of sparse gradients, which go by no other."""

BY_ROWS: Mapping[str, Callable[[Compressor, int, int, World], Sending]] = MappingProxyType(
    {"factors": factors.sending, "owners": owners.sending}
)
"""Exchanges of the rows that a linear layer's gradient is made of (:mod:`commlib.factors`), each with what sends them:
given the codec, the layer's outputs and inputs, and this rank."""
