"""``factors``: the rows a linear layer's gradient is made of, from every rank to every rank, and one product there.

Sufficient-factor broadcasting (Xie et al., UAI 2016; Poseidon, USENIX ATC 2017). The rows have left already when DDP
asks for the bucket (:mod:`commlib.exchange.factors`); here they are waited for, and ``(V_all/P)ᵀ·U_all`` is written
into it. All ranks multiply the same rows in the same order, so their bits are equal on equal machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec
from commlib.exchange.collectives import Rounds
from commlib.exchange.factors import broadcast
from commlib.exchange.factors.broadcast import refuse
from commlib.exchange.factors.delivery import ToAll
from commlib.exchange.factors.payload import Payload, Room
from commlib.exchange.layer_task import Item, Stripe
from commlib.groups.world import World

__all__ = ["ROUNDS", "owned", "refuse", "rounds", "sending", "wire_bytes"]

ROUNDS = broadcast.ROUNDS


def sending(codec: Compressor, n: int, m: int, world: World) -> ToAll:
    """To all ranks, of a layer with weight (N, M)."""
    return ToAll(Payload(n, m, None if codec.lossless else codec), world)


def wire_bytes(codec: Compressor, spec: LayerSpec, world: int) -> float:
    """Bytes a rank sends a step: (P − 1)·K(M + N) values for a weight, nothing for a bias; NaN while K is unknown."""
    if spec.kind != "linear.weight":
        return 0.0
    if spec.rows is None:
        return math.nan
    room = Room(spec.rows, spec.dtype if codec.lossless else Room.dtype)
    return sending(codec, *spec.matrix, World(0, world)).busiest(room)


def owned(codec: Compressor, spec: LayerSpec, world: World) -> Stripe | None:
    """No rank owns a part."""
    return None


def rounds(items: Sequence[Item], world: World, buffer: Tensor | None) -> Rounds:
    """Collect the rows, and multiply them."""
    for item in (yield from broadcast.collect(items, world)):
        with item.meter.phase("decompress"):
            grad = item.grad.view(item.spec.shape)
            broadcast.multiply(broadcast.trip_of(item).everyone(), grad, weight=item.spec.kind == "linear.weight")
