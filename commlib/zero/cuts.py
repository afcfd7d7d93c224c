"""Which rank owns which values, and how many bytes that makes. Pure.

Every layer is cut into one stripe a rank (CaffeOnSpark cuts all parameters in a row into equal chunks: a layer's own
cuts do not move when others are added). Where a codec counts by rows, stripes are of whole rows; all else is cut
between any two values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.buffers import Packing
from commlib.exchange.scatter_gather import stripes
from commlib.planning.plan import Plan, PlannedLayer
from commlib.planning.planner import make_plan
from commlib.planning.policy import policy_of
from commlib.planning.route import Route, Rule, Rules

NBYTES = 25 << 20
"""Of gradients that leave together, about: as DDP's buckets."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A layer as it is shared out.

    Attributes:
        spec: as it is exchanged: (n,) unless its codec counts by rows.
        codec: of its gradient on the way to owners.
    """

    spec: LayerSpec
    codec: Compressor

    def owned(self, rank: int, world: int) -> slice:
        """Of its values in a row, those of a rank; perhaps none."""
        stripe = stripes(self.codec, self.spec, world)[rank]
        width = self.spec.numel // max(1, self.spec.shape[0])
        return slice(stripe.start * width, stripe.stop * width)


def plan_of(specs: Sequence[LayerSpec], rules: Rules, *, world: int, min_size: int) -> Plan:
    """How gradients travel to owners: by the codecs of rules, or as they are.

    Raises:
        ValueError: a bad rule; a codec whose payloads no owner can add up; a rule that names another exchange.
        TypeError: not a rule: a policy, a plan.
    """
    if isinstance(rules, Plan):
        raise TypeError("a Plan has routes of other exchanges: name a codec, or rules by layer")
    if policy_of(rules) is not None:
        raise TypeError(f"{rules} chooses by measurement, which is not done here: name a codec")
    named = {k: _carried(r) for k, r in rules.items()} if isinstance(rules, Mapping) else _carried(rules)
    made = make_plan(specs, named, world=world, min_size=min_size)
    return Plan({p.spec.name: _flat(p) for p in made}, world)


def _carried(rule: Rule) -> Rule:
    """A rule with the exchange whose first half this is."""
    text, at, exchange = rule.partition("@") if isinstance(rule, str) else (rule, "", "")
    if isinstance(rule, Route):
        at, exchange = "@", rule.exchange
    if at and exchange.strip() != "scatter_gather":
        raise ValueError(f"{rule}: gradients go to their owners here, by no other exchange: name a codec alone")
    if isinstance(text, str):
        return f"{text}@scatter_gather"
    return Route("scatter_gather", text) if isinstance(text, Compressor) else text


def _flat(layer: PlannedLayer) -> PlannedLayer:
    """With the codec that it goes by to owners, and cut between any two values where that codec has no rows."""
    rowless = layer.route.exchange == "dense" or layer.route.codec.lossless
    spec = dataclasses.replace(layer.spec, shape=(layer.spec.numel,)) if rowless else layer.spec
    route = Route("scatter_gather", layer.route.codec)
    return PlannedLayer(spec, route, Route("scatter_gather", layer.dense.codec), layer.reason)


def buckets_of(plan: Plan, nbytes: int = NBYTES) -> list[list[Cut]]:
    """All layers in the order in which a backward pass reaches them, those of one dtype and device together."""
    found: list[list[Cut]] = []
    open_: dict[object, list[Cut]] = {}
    for layer in reversed(list(plan)):
        kind, cut = (layer.spec.dtype, layer.spec.device), Cut(layer.spec, layer.route.codec)
        row = open_.get(kind)
        if row is None or sum(c.spec.nbytes for c in row) + cut.spec.nbytes > nbytes:
            row = open_[kind] = []
            found.append(row)
        row.append(cut)
    return found


def rows_of(cuts: Sequence[Cut], world: int) -> list[Packing]:
    """For every rank, its values of these layers as bytes one after another."""
    return [
        Packing([_length(cut.owned(rank, world)) * cut.spec.dtype.itemsize for cut in cuts]) for rank in range(world)
    ]


def wire_bytes(buckets: Sequence[Sequence[Cut]], rank: int, world: int) -> int:
    """Payload bytes that a rank sends in a step: gradients to their owners, its values to all.

    Without a codec, of n values that divide evenly, that is an all-reduce's 2(P−1)/P·4n.
    """
    total = 0
    for cuts in buckets:
        owned = [[stripe.spec for stripe in stripes(c.codec, c.spec, world)] for c in cuts]
        coded = [[c.codec.nbytes(spec) for spec in specs] for c, specs in zip(cuts, owned, strict=True)]
        to = [Packing(lengths).total for lengths in zip(*coded, strict=True)]
        total += sum(to) - to[rank] + (world - 1) * max(row.total for row in rows_of(cuts, world))
    return total


def verdict_bytes(buckets: Sequence[Sequence[Cut]], world: int) -> int:
    """Bytes that a rank sends in a step to agree on whether it counts (:mod:`commlib.zero.bucket_order`)."""
    return (world - 1) * (16 + sum(len(cuts) for cuts in buckets))


def _length(part: slice) -> int:
    return int(part.stop - part.start)
