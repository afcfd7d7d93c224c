"""Which way each layer goes: routes, the rules that choose them, and the plan they add up to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from commlib.codecs.base import Compressor, LayerSpec
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.codecs.registry import make
from commlib.errors import unknown
from commlib.exchange.base import Carrier
from commlib.exchange.registry import BY_ROWS, BY_SERVERS, CARRIERS, EXCHANGES, OF_SPARSE


@dataclasses.dataclass(frozen=True)
class Route:
    """An exchange and the codec whose payloads it carries. As text: ``onebit:axis=tensor@gather``.

    Args:
        exchange: dense, gather, scatter_gather, low_rank, blocks, factors, owners, push_pull or sparse;
            reduce_scatter is that of a sharded model.
        codec: taken as it is; wrap it in :class:`ErrorFeedback` if it needs that.

    Raises:
        ValueError: unknown exchange.
    """

    exchange: str
    codec: Compressor

    def __post_init__(self) -> None:
        if self.exchange not in CARRIERS:
            raise ValueError(unknown("exchange", self.exchange, EXCHANGES))

    def carrier(self) -> Carrier:
        """The exchange's module."""
        return CARRIERS[self.exchange]

    @property
    def by_rows(self) -> bool:
        """Whether the rows that a gradient is made of travel, and not the gradient
        (:mod:`commlib.exchange.factors`)."""
        return self.exchange in BY_ROWS

    @property
    def plain(self) -> bool:
        """Whether gradients go as they are, in every step: as without a hook."""
        as_it_is = self.codec.lossless and type(self.codec).at is Compressor.at
        return as_it_is and self.exchange in ("dense", "reduce_scatter")

    def in_any_order(self, spec: LayerSpec) -> bool:
        """Whether a layer's values may be exchanged in any order: each by itself, and nothing is remembered of them."""
        alone = self.plain or (self.codec.elementwise and not self.codec.slots(spec))
        return alone and self.exchange == "dense"

    def refuse(self, spec: LayerSpec) -> str | None:
        """Why this pair cannot carry this layer, or None."""
        if spec.sparse and self.exchange not in OF_SPARSE:
            return "its gradient is sparse, and goes by the exchange 'sparse' only"
        return self.carrier().refuse(self.codec, spec)

    def __str__(self) -> str:
        return f"{self.codec}@{self.exchange}"


Rule = str | Compressor | Route
Rules = Rule | Mapping[str, Rule]


def resolve(rule: Rule, world: int) -> Route:
    """A route from what a user writes; a plain spec string gets the exchange that suits it.

    Quantisers go by ``gather`` between two ranks (the same bytes as scatter_gather there, one round and one
    rounding fewer) and by ``scatter_gather`` between more; the other codecs say which exchange is theirs.

    Raises:
        ValueError: unknown codec, option or exchange, or a pair that cannot work.
        TypeError: not a rule.
    """
    if isinstance(rule, Route):
        route = rule
    else:
        text, _, exchange = rule.partition("@") if isinstance(rule, str) else (rule, "", "")
        if text == "auto":
            raise ValueError("'auto' chooses for all layers by measurement: give it alone, not as a rule for some")
        if isinstance(text, str) and text in {*BY_ROWS, *BY_SERVERS} and not exchange:
            text, exchange = "none", text
        codec = make("none" if text == "dense" else text)
        if exchange.strip() in BY_ROWS and isinstance(codec, ErrorFeedback):
            codec = codec.inner  # rows are others every step: there is nothing to keep for them
        suited = codec.default_exchange or ("gather" if world <= 2 else "scatter_gather")
        route = Route(exchange.strip() or suited, codec)
    if route.exchange not in EXCHANGES:
        raise ValueError(f"{route}: it leaves each rank a part of the mean, which is for sharded models (FSDP2) only")
    sparse = route.exchange in OF_SPARSE
    reason = route.refuse(LayerSpec("any", (64, 64), kind="linear.weight", layer="any", sparse=sparse))
    if reason:
        raise ValueError(f"{route.codec} cannot go over {route.exchange}: {reason}")
    return route
