"""All exchanges, by the names that routes have for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from commlib.exchange.base import Carrier, Exchange
from commlib.exchange.blocks import BlocksExchange
from commlib.exchange.dense import DenseExchange
from commlib.exchange.factors.broadcast import FactorExchange, RowExchange
from commlib.exchange.factors.owners import OwnerExchange
from commlib.exchange.gather import GatherExchange
from commlib.exchange.low_rank import LowRankExchange
from commlib.exchange.push_pull import PushPullExchange
from commlib.exchange.reduce_scatter import ReduceScatter
from commlib.exchange.scatter_gather import ScatterGatherExchange
from commlib.exchange.sparse import SparseExchange

_ROWS: tuple[RowExchange, ...] = (FactorExchange(), OwnerExchange())
_ALL: tuple[Exchange, ...] = (
    *(DenseExchange(), GatherExchange(), ScatterGatherExchange(), LowRankExchange(), BlocksExchange()),
    *_ROWS,
    *(PushPullExchange(), SparseExchange()),
)

EXCHANGES: Mapping[str, Exchange] = MappingProxyType({exchange.name: exchange for exchange in _ALL})
"""Exchanges that leave all ranks with the mean."""

CARRIERS: Mapping[str, Carrier] = MappingProxyType({**EXCHANGES, ReduceScatter.name: ReduceScatter()})
"""These, and what leaves every rank with its own part of the mean (:mod:`commlib.fsdp`)."""

BY_SERVERS: frozenset[str] = frozenset({PushPullExchange.name})
"""Exchanges that need servers."""

OF_SPARSE: frozenset[str] = frozenset({SparseExchange.name})
"""Exchanges of sparse gradients, which go by no other."""

BY_ROWS: Mapping[str, RowExchange] = MappingProxyType({exchange.name: exchange for exchange in _ROWS})
"""Exchanges of the rows that a linear layer's gradient is made of (:mod:`commlib.exchange.factors`)."""
