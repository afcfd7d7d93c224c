"""How a gradient travels. Each exchange is a module with the functions of :class:`~commlib.exchange.base.Exchange`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast

from commlib.codecs.base import Compressor
from commlib.exchange import blocks, dense, gather, low_rank, push_pull, reduce_scatter, scatter_gather, sparse
from commlib.exchange.base import Carrier, Exchange
from commlib.exchange.factors import broadcast, owners
from commlib.exchange.factors.delivery import Sending
from commlib.groups.world import World

EXCHANGES: Mapping[str, Exchange] = MappingProxyType(
    {
        "dense": cast(Exchange, dense),
        "gather": cast(Exchange, gather),
        "scatter_gather": cast(Exchange, scatter_gather),
        "low_rank": cast(Exchange, low_rank),
        "blocks": cast(Exchange, blocks),
        "factors": cast(Exchange, broadcast),
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
    {"factors": broadcast.sending, "owners": owners.sending}
)
"""Exchanges of the rows that a linear layer's gradient is made of (:mod:`commlib.exchange.factors`), each with what
sends them: given the codec, the layer's outputs and inputs, and this rank."""
