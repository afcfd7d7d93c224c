"""Which way each layer goes: routes, the rules that choose them, and the plan they add up to."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from commlib.compressor import Compressor, LayerSpec
from commlib.errors import unknown
from commlib.exchange import BY_ROWS, BY_SERVERS, CARRIERS, EXCHANGES, OF_SPARSE
from commlib.exchange.base import Carrier
from commlib.exchange.scatter_gather import stripes
from commlib.feedback import ErrorFeedback
from commlib.registry import make


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
        """Whether the rows that a gradient is made of travel, and not the gradient (:mod:`commlib.factors`)."""
        return self.exchange in BY_ROWS

    @property
    def plain(self) -> bool:
        """Whether gradients go as they are, in every step: as without a hook."""
        as_it_is = self.codec.lossless and type(self.codec).at is Compressor.at
        return as_it_is and self.exchange in ("dense", "reduce_scatter")

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


@dataclasses.dataclass(frozen=True)
class PlannedLayer:
    """One line of a plan.

    Attributes:
        spec: the layer.
        route: its route.
        dense: the dense route of warm-up steps.
        reason: why it has that route.
        predicted_s: seconds its exchange takes by itself, where a manager has predicted it.
        measured_s: seconds from its issue to its end, coding included, on this rank: what runs beside it counts too.
    """

    spec: LayerSpec
    route: Route
    dense: Route
    reason: str
    predicted_s: float | None = None
    measured_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Layer by layer, how gradients travel. Prints as a table.

    Attributes:
        layers: by parameter name.
        world: ranks, or under a hierarchy nodes: those that a route connects.
        about: a line on the whole.
        local: ranks on each node under a hierarchy, each of which exchanges a stripe of every layer; otherwise 1.
    """

    layers: Mapping[str, PlannedLayer]
    world: int
    about: str = ""
    local: int = 1

    def __iter__(self) -> Iterator[PlannedLayer]:
        return iter(self.layers.values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Keep it in a file, for :meth:`load`. A file that is there is replaced, whole or not at all.

        Raises:
            OSError: it cannot be written.
            ValueError: a route has no name that can be read back.
        """
        plan_file().save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """A plan from a file. ``commlib.attach(ddp, plan)`` pins it: its routes, and no others.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no plan.
        """
        plan: Plan = plan_file().load(path)
        return plan

    def diff(self, new: Plan) -> str:
        """What differs in a new plan, as text."""
        text: str = plan_file().diff(self, new)
        return text

    def because(self, about: str, reason: str) -> Plan:
        """The same routes for another reason; sparse gradients have but one."""
        layers = {n: p if p.spec.sparse else dataclasses.replace(p, reason=reason) for n, p in self.layers.items()}
        return Plan(layers, self.world, about, self.local)

    def noted(self, about: str, *, local: int = 1) -> Plan:
        """The same plan, with one more thing to say about it, and with so many ranks on a node."""
        return dataclasses.replace(self, about="; ".join(filter(None, [self.about, about])), local=local)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether all layers go as they are, as without a hook."""
        return all(p.route.plain for p in self)

    @functools.cached_property
    def remembers(self) -> bool:
        """Whether any route keeps something from step to step."""
        return any(p.route.codec.slots(p.spec) or p.route.codec.random for p in self)

    def describe(self) -> dict[str, str]:
        """Name → ``shape dtype route``: what every rank must agree on."""
        return {p.spec.name: f"{p.spec.layout()} {p.route}" for p in self}

    def __str__(self) -> str:
        head = ["layer", "gradient", "route", "bytes/step", "of dense", "predicted ms", "measured ms", "why"]
        rows = [head, *(self._row(p) for p in self)]
        shown = [i for i in range(len(head)) if i not in (5, 6) or any(r[i] != "-" for r in rows[1:])]
        widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
        lines = ["  ".join((str.rjust if 3 <= i <= 6 else str.ljust)(r[i], widths[i]) for i in shown) for r in rows]
        return "\n".join([*filter(None, [self.about]), *(line.rstrip() for line in lines)])

    def _row(self, p: PlannedLayer) -> list[str]:
        ranks = self.world * self.local
        passes = getattr(p.route.carrier(), "PASSES", 2)
        sent, full = self._sent(p), passes * (ranks - 1) / ranks * p.spec.nbytes
        known = not math.isnan(sent)
        share = f"1/{full / sent:.1f}" if sent and full and known else "-"
        times = ["-" if s is None else f"{s * 1e3:.3g}" for s in (p.predicted_s, p.measured_s)]
        return [
            p.spec.name,
            p.spec.layout(),
            str(p.route),
            f"{sent:,.0f}" if known else "by batch",
            share,
            *times,
            p.reason,
        ]

    def _sent(self, p: PlannedLayer) -> float:
        """Bytes that the busiest rank sends by a route in a step: under a hierarchy, to other nodes."""
        carry = p.route.carrier().wire_bytes
        if self.local == 1 or p.route.by_rows:
            return carry(p.route.codec, p.spec, self.world * self.local)
        return max(carry(p.route.codec, s.spec, self.world) for s in stripes(p.route.codec, p.spec, self.local))


def plan_file() -> Any:
    """The module of plan files, which knows this one."""
    return importlib.import_module("commlib.plan_file")
