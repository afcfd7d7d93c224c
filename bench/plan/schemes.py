"""Time of a step by each scheme, on a number of ranks.

When a step's gradients are there: a forward and backward pass on paper, in DDP's buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from commlib.messaging.link_model import Link
from commlib.planning.cost import route_cost, volume
from commlib.planning.cost.choose import choose
from commlib.planning.cost.overlap import Bucket, TrainingPass, finish
from commlib.planning.cost.route_cost import Candidate

from .assumptions import Assumptions
from .model import LayeredModel, ModelLayer

BYTES = 4
"""Of a value: float32."""
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20
"""Bytes at which DDP closes its first bucket and every other one."""


def alone_s(model: LayeredModel, setting: Assumptions) -> float:
    """Seconds of a step of one rank: forward, and twice that backward."""
    return setting.compute_s(3 * model.flops * setting.batch)


def one_pass(model: LayeredModel, setting: Assumptions) -> TrainingPass:
    """A step that is all dense.

    The backward pass goes through the layers from the last to the first. Each takes twice its forward pass: once for
    the gradient of its weight, once for that of its input. A layer's gradient is there when both are.

    What is computed for an exchange runs on the GPU that also computes the backward pass, so no cores are spare.
    """
    now = setting.compute_s(model.flops * setting.batch)
    rows, ready = {}, {}
    for layer in reversed(model.layers):
        if layer.linear:
            rows[layer.name] = now
        now += 2 * setting.compute_s(layer.flops * setting.batch)
        ready[layer.name] = now
    made = tuple(Bucket(ready[names[-1]], names) for names in buckets(model.layers))
    return TrainingPass(made, rows, now, spare_cores=False)


def without_overlap(p: TrainingPass) -> TrainingPass:
    """The same, with every bucket held back until the backward pass has ended."""
    return dataclasses.replace(p, buckets=tuple(dataclasses.replace(b, ready=p.end) for b in p.buckets))


def buckets(layers: Sequence[ModelLayer]) -> Iterator[tuple[str, ...]]:
    """Names of the layers that DDP hands over together, in its order: from the last layer on.

    A bucket is closed by the layer that fills it, so it may be larger than its limit. Weight and bias stay together.
    """
    names: list[str] = []
    size, limit = 0, FIRST_BUCKET
    for layer in reversed(layers):
        if not layer.parameters:
            continue
        names.append(layer.name)
        size += BYTES * layer.parameters
        if size >= limit:
            yield tuple(names)
            names, size, limit = [], 0, BUCKET
    if names:
        yield tuple(names)


SCHEMES: Mapping[str, str] = {
    "dense": "all-reduce of every gradient in DDP's buckets, beside the backward pass",
    "no overlap": "the same, after the backward pass",
    "factors": "every linear layer by its factors, the rest dense",
    "owners": "every linear layer's rows to the owners of its blocks, which send these to all; the rest dense",
    "auto": "each linear layer by factors, owners or dense, as commlib.planning.cost.choose decides",
    "adam": "factors of every linear layer to the rank that owns it, which sends the matrix to all; the rest dense",
}
"""Name → what it does, in the order of the table's columns."""


@dataclasses.dataclass(frozen=True)
class SchemeOutcome:
    """Outcome of one scheme on so many ranks.

    Args:
        ranks: P.
        scheme: one of :data:`SCHEMES`.
        step_s: seconds of a step.
        alone_s: seconds of a step of one rank, of the same batch.
        ways: layer → its way.
    """

    ranks: int
    scheme: str
    step_s: float
    alone_s: float
    ways: Mapping[str, Candidate]

    @property
    def speedup(self) -> float:
        """Examples a second over those of one rank: P·t(1)/t(P)."""
        return self.ranks * self.alone_s / self.step_s

    @property
    def sent(self) -> float:
        """Bytes that a rank sends a step; with adam, one that would own every linear layer."""
        return sum(w.sent for w in self.ways.values())

    @property
    def changed(self) -> tuple[str, ...]:
        """Layers that are not dense."""
        return tuple(name for name, way in self.ways.items() if way.route != "dense")


def outcomes(model: LayeredModel, setting: Assumptions, ranks: int) -> list[SchemeOutcome]:
    """A step by every scheme, in the order of :data:`SCHEMES`.

    Args:
        model: its layers.
        setting: link and compute of a rank.
        ranks: P; with one rank every scheme is the step alone.

    Raises:
        ValueError: fewer than one rank.
    """
    link = Link.ring(ranks, setting.gbit, setting.latency_s)
    p, alone = one_pass(model, setting), alone_s(model, setting)
    layers = {x.name: x for x in model.layers if x.parameters}
    dense = {name: route_cost.dense(BYTES * x.parameters, link) for name, x in layers.items()}
    if ranks == 1:
        return [SchemeOutcome(1, scheme, alone, alone, dense) for scheme in SCHEMES]
    rows = {name: _factors(x, setting, link) for name, x in layers.items() if x.linear}
    owned = {name: _adam(x, setting, link) for name, x in layers.items() if x.linear}
    blocks = {name: _owners(x, setting, link) for name, x in layers.items() if x.linear}
    chosen = choose(p, dense, {name: [rows[name], blocks[name]] for name in rows})
    found: dict[str, tuple[TrainingPass, Mapping[str, Candidate]]] = {
        "dense": (p, dense),
        "no overlap": (without_overlap(p), dense),
        "factors": (p, {**dense, **rows}),
        "owners": (p, {**dense, **blocks}),
        "auto": (p, chosen.ways),
        "adam": (p, {**dense, **owned}),
    }
    return [SchemeOutcome(ranks, scheme, finish(*found[scheme]), alone, found[scheme][1]) for scheme in SCHEMES]


def crossover(layer: ModelLayer, ranks: int) -> float:
    """K*: rows of a rank above which its matrix is fewer bytes than its factors; ∞ for one rank."""
    return volume.crossover_rows(layer.inputs, layer.outputs, ranks, ranks)


def _weight_gradient_s(layer: ModelLayer, setting: Assumptions) -> float:
    """Seconds of the weight's gradient from a rank's own rows: as many FLOPs as the forward pass."""
    return setting.compute_s(layer.flops * setting.batch)


def _factors(layer: ModelLayer, setting: Assumptions, link: Link) -> Candidate:
    local = _weight_gradient_s(layer, setting)
    n, m, rows = layer.outputs, layer.inputs, layer.rows * setting.batch
    return route_cost.factors(n, m, rows, link, local_s=local, rebuild_s=link.world * local, itemsize=BYTES)


def _owners(layer: ModelLayer, setting: Assumptions, link: Link) -> Candidate:
    local, rows = _weight_gradient_s(layer, setting), layer.rows * setting.batch
    return route_cost.owners(layer.outputs, layer.inputs, rows, link, local_s=local, itemsize=BYTES)


def _adam(layer: ModelLayer, setting: Assumptions, link: Link) -> Candidate:
    """Seconds at the owner: all others' rows come in, and only then can the matrix go out, so both directions add
    up."""
    shape = volume.FactorableShape(layer.inputs, layer.outputs, layer.rows * setting.batch, link.world, link.world)
    seconds = 2 * setting.latency_s + link.all_gather.beta * BYTES * volume.adam_colocated(shape)
    local = _weight_gradient_s(layer, setting)
    sent = float(BYTES * (link.world - 1) * shape.matrix)
    return Candidate("adam", sent, seconds, 0.0, after_s=link.world * local, saved_s=local, early=True)
