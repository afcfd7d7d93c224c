"""Exchange ``factors``, and what ``owners`` shares with it: rows are waited for, or the matrices summed after all.

The rows have left already when DDP asks for the bucket (:mod:`commlib.exchange.factors`), on a process group that
carries their first rounds only, or over NCCL the buckets too, in an order that all ranks keep. What follows is issued
in the lanes: after the wait, in one round, the rows again or the matrices, layer by layer in the order of the bucket.
Each rank chooses by all ranks' words, so each issues the same collectives, and whether there are any is the same
everywhere.

``factors``: the rows a linear layer's gradient is made of, from every rank to every rank, and one product there.

Sufficient-factor broadcasting (Xie et al., UAI 2016; Poseidon, USENIX ATC 2017). The rows have left already when DDP
asks for the bucket (:mod:`commlib.exchange.factors`); here they are waited for, and ``(V_all/P)ᵀ·U_all`` is written
into it. All ranks multiply the same rows in the same order, so their bits are equal on equal machines.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.base import Exchange
from commlib.exchange.collectives import AllGather, AllReduce, Among, Collective, Payers, Rounds
from commlib.exchange.factors import payload
from commlib.exchange.factors.delivery import BroadcastDelivery, RowDelivery
from commlib.exchange.factors.payload import RowCapacity, RowPayload
from commlib.exchange.factors.rounds import WORD, Again, FactorRounds, First
from commlib.exchange.factors.tap import Rows
from commlib.exchange.layer_task import LayerTask
from commlib.groups.world import World
from commlib.runtime.streams import host


class RowExchange(Exchange):
    """Base of the exchanges of the rows that a linear layer's gradient is made of (:mod:`commlib.exchange.factors`)."""

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """Refuse what is no weight or bias of a linear layer, and codecs of rows that keep a memory."""
        if (reason := payload.refuse(codec)) is not None:
            return reason
        if spec.layer is None:
            return "its gradient has no factors: it is not of an nn.Linear of its own"
        return None

    @abc.abstractmethod
    def sending(self, codec: Compressor, n: int, m: int, world: World) -> RowDelivery:
        """Delivery that sends the rows of a layer with weight (n, m) to other ranks."""


class FactorExchange(RowExchange):
    """Sufficient-factor broadcasting: the rows of every rank to every rank, and one product there."""

    name = "factors"
    ROUNDS = 2

    def sending(self, codec: Compressor, n: int, m: int, world: World) -> BroadcastDelivery:
        """Delivery to all ranks, of a layer with weight (N, M)."""
        return BroadcastDelivery(RowPayload(n, m, None if codec.lossless else codec), world)

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Bytes a rank sends a step: (P − 1)·K(M + N) values for a weight, 0 for a bias; NaN while K is unknown."""
        if spec.kind != "linear.weight":
            return 0.0
        if spec.rows is None:
            return math.nan
        room = RowCapacity(spec.rows, spec.dtype if codec.lossless else RowCapacity.dtype)
        return self.sending(codec, *spec.matrix, World(0, world)).busiest(room)

    def rounds(self, items: Sequence[LayerTask], world: World, buffer: Tensor | None) -> Rounds:
        """Collect the rows, and multiply them."""
        here = yield from collect(items, world)
        into = targets(here)
        for item in into:
            with item.meter.phase("decompress"):
                grad = item.grad.view(item.spec.shape)
                multiply(trip_of(item).everyone(), grad, weight=item.spec.kind == "linear.weight")
        compare(into, here)


def collect(items: Sequence[LayerTask], world: World) -> Generator[list[Collective], None, list[LayerTask]]:
    """Wait for the rows; send them again or sum the matrices where any rank asks for it.

    Rows have left perhaps before a rank knew that there would be other gradient. So it is with the bucket that each
    rank's word of them travels, when that is certain.

    Returns:
        The items whose rows are there, the same on every rank; the others hold the mean gradient already.
    """
    trips = [(item, trip_of(item)) for item in items]
    layers = {id(trip): (item, trip) for item, trip in reversed(trips)}
    device, said = items[0].grad.device, [value for _, trip in layers.values() for value in trip.word()]
    mine = host(len(said), torch.int64, device)
    for i, value in enumerate(said):
        mine[i].fill_(value)
    words = host(world.size * len(said), torch.int64, device)
    payers = [(item.meter, WORD) for item, _ in layers.values()]
    yield [
        *(First(trip, _payers(item)) for item, trip in trips),
        Among("hosts", AllGather(words.view(torch.uint8), mine.view(torch.uint8), payers)),
    ]
    heard = words.view(world.size, len(layers), 2).tolist()
    each = dict(zip(layers, zip(*heard, strict=True), strict=True))  # layer → a word of each rank
    ways = [trip.way(each[id(trip)]) for _, trip in trips]
    second: list[Collective] = []
    proved = [item for way, (item, trip) in zip(ways, trips, strict=True) if trip.proving and way != "summed"]
    sizes = torch.stack([_size(item.grad) for item in proved]) if proved else None
    for way, (item, trip) in zip(ways, trips, strict=True):
        if way == "again":
            second.append(Again(trip, _payers(item)))
        if way == "summed" and trip.proving:
            _compare_own(item, trip)
        if way == "summed" or trip.proving:
            with item.meter.phase("compress"):
                if not trip.proving:  # else autograd has had it all
                    _add(item, trip.own())
                item.grad.mul_(1 / world.size)
            second.append(AllReduce(item.grad, [(item.meter, item.grad.nbytes)]))
    if sizes is not None:
        second.append(AllReduce(sizes, [(proved[0].meter, sizes.nbytes)]))
    if second:
        yield second
    if sizes is not None:
        for item, size in zip(proved, (sizes / world.size).tolist(), strict=True):
            trip_of(item).sizes[item.spec.kind] = size
    return [item for way, item in zip(ways, items, strict=True) if way != "summed"]


def _compare_own(item: LayerTask, trip: FactorRounds) -> None:
    """Compare what this rank's own rows would have added with its gradient, where matrices are summed after all."""
    if trip.foreign:
        trip.summed = True
        return
    own = dataclasses.replace(item, grad=torch.zeros_like(item.grad))
    _add(own, trip.own())
    trip.sizes[item.spec.kind] = float(_size(item.grad))
    _compare(item, own.grad)


def _size(grad: Tensor) -> Tensor:
    """Largest magnitude of a gradient, float64, of no dimension."""
    return grad.abs().max().double() if grad.numel() else torch.zeros((), dtype=torch.float64, device=grad.device)


def targets(items: Sequence[LayerTask]) -> list[LayerTask]:
    """The tasks, with memory of their own where rows are only to be compared with the gradient, which is there."""
    return [
        dataclasses.replace(item, grad=torch.empty_like(item.grad)) if trip_of(item).proving else item for item in items
    ]


def compare(made: Sequence[LayerTask], items: Sequence[LayerTask]) -> None:
    """Compare what rows have made, in :func:`targets`, with the mean gradients."""
    for target, item in zip(made, items, strict=True):
        if target is not item:
            _compare(item, target.grad)


def _compare(item: LayerTask, made: Tensor) -> None:
    wrong = trip_of(item).compare(made, item.grad, item.spec.kind)
    if wrong and item.spec.layer is not None:
        layer = item.spec.layer
        advice = f'give the layer another route, for example {{"{layer}.*": "none"}}, and tell us of the model'
        item.fault(layer, f"{wrong}: {advice}")


def trip_of(item: LayerTask) -> FactorRounds:
    """The rows of its layer.

    Raises:
        ValueError: it has none.
    """
    if item.trip is None:
        raise ValueError(f"{item.spec.name} has no factors in this step")  # refuse() has been passed over
    return item.trip


def multiply(rows: Rows, out: Tensor, *, weight: bool) -> None:
    """The gradient that rows make, into ``out``: of a weight VᵀU, of a bias the sum of V."""
    u, v = rows
    if not weight:
        torch.sum(v, 0, out=out) if out.dtype == v.dtype else out.copy_(v.sum(0))
    elif out.dtype == v.dtype:
        torch.mm(v.t(), u, out=out)
    else:
        out.copy_(v.t() @ u)


def _payers(item: LayerTask) -> Payers:
    return [(item.meter, 1)] if item.spec.kind == "linear.weight" else []


def _add(item: LayerTask, rows: Rows | None) -> None:
    """Add this rank's own to what there is besides."""
    if rows is None:
        return
    u, v = rows
    grad = item.grad.view(item.spec.shape)
    grad.add_((v.sum(0) if item.spec.kind != "linear.weight" else v.t() @ u).to(grad.dtype))
