"""``factors``: the rows a linear layer's gradient is made of, from every rank to every rank, and one product there.

Sufficient-factor broadcasting (Xie et al., UAI 2016; Poseidon, USENIX ATC 2017). The rows have left already when
DDP asks for the bucket (:mod:`commlib.factors`); here they are waited for, and ``(V_all/P)ᵀ·U_all`` is written into
it. All ranks multiply the same rows in the same order, so their bits are equal on equal machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.collective import AllReduce, Collective, Payers, Rounds
from commlib.compressor import Compressor, LayerSpec
from commlib.exchange.item import Item, Stripe, World
from commlib.factors import payload
from commlib.factors.trip import Again, First, Trip

ROUNDS = 2


def refuse(codec: Compressor, spec: LayerSpec) -> str | None:
    """For the weight and bias of linear layers; rows may be compressed by what keeps no memory."""
    if (reason := payload.refuse(codec)) is not None:
        return reason
    if spec.layer is None:
        return "its gradient has no factors: it is not of an nn.Linear of its own"
    return None


def wire_bytes(codec: Compressor, spec: LayerSpec, world: int) -> float:
    """Bytes a rank sends a step: (P − 1)·K(M + N) values for a weight, nothing for a bias; NaN while K is unknown."""
    if spec.kind != "linear.weight":
        return 0.0
    if spec.rows is None:
        return math.nan
    room = payload.Room(spec.rows, spec.dtype if codec.lossless else torch.float32)
    return (world - 1) * payload.Payload(*spec.matrix, None if codec.lossless else codec).nbytes(room)


def owned(codec: Compressor, spec: LayerSpec, world: World) -> Stripe | None:
    """No rank owns a part."""
    return None


def rounds(items: Sequence[Item], world: World, buffer: Tensor | None) -> Rounds:
    """Wait for the rows; gather them again or sum the matrices where any rank asks for it; multiply.

    Headers have left with the rows, perhaps before a rank knew that there would be other gradient. So one word a
    layer travels with the bucket, when that is certain.
    """
    trips = [(item, _trip(item)) for item in items]
    late = torch.tensor([trip.late for _, trip in trips], dtype=torch.int32, device=items[0].grad.device)
    yield [
        *(First(trip, _payers(item)) for item, trip in trips),
        AllReduce(late, [(item.meter, late.itemsize) for item in items]),
    ]
    heard = [trip.way() for _, trip in trips]
    ways = ["summed" if n else way for n, way in zip(late.tolist(), heard, strict=True)]
    second: list[Collective] = []
    for way, (item, trip) in zip(ways, trips, strict=True):
        if way == "again":
            second.append(Again(trip, _payers(item)))
        elif way == "summed":
            with item.meter.phase("compress"):
                _add(item, trip.own())
                item.grad.mul_(1 / world.size)
            second.append(AllReduce(item.grad, [(item.meter, item.grad.nbytes)]))
    if second:
        yield second
    for way, (item, trip) in zip(ways, trips, strict=True):
        if way != "summed":
            with item.meter.phase("decompress"):
                _write(item, trip.everyone())


def _trip(item: Item) -> Trip:
    if item.trip is None:
        raise ValueError(f"{item.spec.name} has no factors in this step")  # refuse() has been passed over
    return item.trip


def _payers(item: Item) -> Payers:
    return [(item.meter, 1)] if item.spec.kind == "linear.weight" else []


def _write(item: Item, rows: tuple[Tensor, Tensor]) -> None:
    """The gradient that rows make: of a weight VᵀU, of a bias the sum of V."""
    u, v = rows
    grad = item.grad.view(item.spec.shape)
    if item.spec.kind != "linear.weight":
        torch.sum(v, 0, out=grad) if grad.dtype == v.dtype else grad.copy_(v.sum(0))
    elif grad.dtype == v.dtype:
        torch.mm(v.t(), u, out=grad)
    else:
        grad.copy_(v.t() @ u)


def _add(item: Item, rows: tuple[Tensor, Tensor] | None) -> None:
    """Add this rank's own to what there is besides."""
    if rows is None:
        return
    u, v = rows
    grad = item.grad.view(item.spec.shape)
    grad.add_((v.sum(0) if item.spec.kind != "linear.weight" else v.t() @ u).to(grad.dtype))
