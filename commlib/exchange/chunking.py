"""Large layers travel in parts, one after another: while one is on its way the next is coded, and the last decoded.

DDP's buckets do that for layers smaller than a bucket; a larger one is a bucket of its own, and without parts would be
coded, sent and decoded in turn. Which layers are cut, and where, follows from plan and shapes alone: so it is the same
on every rank and in every run, and no measured number decides what bits a model gets.

Parts are exchanges like any other, submitted in order, and :mod:`commlib.exchange.sequencer` has the argument. All that
is not cut goes with the last parts: no exchange before that has more rounds, and each lane keeps the order, so when the
last is through, all are. Several threads may be at work on parts of one layer, each on its own: they write other rows
of gradient and slots, and each part has its own arena and meter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from commlib.exchange.buffers import StepBuffers
from commlib.exchange.layer_task import ChunkIndex, LayerTask
from commlib.telemetry.stats import Meter

SIZE = 32 << 20
"""Bytes of gradient in a part, about (docs/adr/0014-parts.md has the figures)."""

_CUT = ("dense", "gather", "scatter_gather")
"""Exchanges that heed an item's part."""

Routes = Mapping[str, Sequence[LayerTask]]


Own = Callable[[LayerTask, int], tuple[StepBuffers, Meter]]
"""Of a layer's part: what it has for itself."""


def in_parts(routes: Routes, own: Own) -> list[Routes]:
    """A bucket's items by exchange as what travels one after another: a list of one, if none of them is large.

    Args:
        routes: exchange → its items, uncut.
        own: asked for parts of an index above 0; the first has the layer's.
    """
    cut = {exchange: [_split(item, count(exchange, item), own) for item in items] for exchange, items in routes.items()}
    trips = max(len(parts) for items in cut.values() for parts in items)
    return [_trip(cut, trips - i) for i in range(trips)]


def count(exchange: str, item: LayerTask) -> int:
    """Number of chunks in which a layer travels."""
    if item.grad.nbytes < 2 * SIZE or exchange not in _CUT:
        return 1
    rows = item.codec.part_rows(item.spec)
    return 1 if rows is None else max(1, min(item.grad.nbytes // SIZE, item.spec.shape[0] // rows))


def _split(item: LayerTask, parts: int, own: Own) -> list[LayerTask]:
    if parts == 1:
        return [item]
    first = item.arena, item.meter
    return [_part(item, ChunkIndex(i, parts), *(own(item, i) if i else first)) for i in range(parts)]


def _part(item: LayerTask, which: ChunkIndex, arena: StepBuffers, meter: Meter) -> LayerTask:
    seeds = dataclasses.replace(item.seeds, layer=f"{item.seeds.layer}/part {which.index}")
    return dataclasses.replace(item, part=which, arena=arena, meter=meter, seeds=seeds)


def _trip(cut: Mapping[str, Sequence[Sequence[LayerTask]]], left: int) -> Routes:
    """Routes of the layers that go when so many trips are left, this one included."""
    going = {exchange: [parts[-left] for parts in items if len(parts) >= left] for exchange, items in cut.items()}
    return {exchange: items for exchange, items in going.items() if items}
