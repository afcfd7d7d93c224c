"""Small layers that go as they are ride with others of their bucket that do not: a bucket sends one collective less.

A collective takes some tenths of a millisecond, whatever it carries, and biases and norms carry next to nothing. So
they are one more layer of the exchange beside them, side by side and uncompressed. Who rides follows from plan and
shapes alone, hence is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commlib.codecs.base import LayerSpec, Memory
from commlib.exchange.chunking import Routes
from commlib.exchange.collectives import Rounds
from commlib.exchange.layer_task import LayerTask
from commlib.exchange.registry import EXCHANGES
from commlib.groups.world import World
from commlib.telemetry.stats import Meter

MOST = 64 << 10
"""Bytes of gradient that ride at most: beyond, their own collective costs less than the copies."""
MOST_MORE = 16 << 10
"""Bytes a rank may send more for it: at 200 Mbit/s they take as long as a collective of one value."""

_CARRIERS = ("low_rank", "scatter_gather", "gather")


def riding(
    routes: Routes, world: World, meter: Callable[[Sequence[LayerTask]], Meter], go: Callable[[Routes], Rounds]
) -> Rounds:
    """Rounds in which dense layers travel with other layers, if they may; else all as it is.

    Args:
        routes: exchange → items that travel together.
        world: this rank.
        meter: of several items, by their share of values.
        go: exchanges what it is given.
    """
    passengers = routes.get("dense", ())
    carrier = _carrier(routes, world)
    if carrier is None:
        yield from go(routes)
        return
    one = _side_by_side(passengers, meter(passengers))
    grads = [item.grad.view(-1) for item in passengers]
    torch.cat(grads, out=one.grad)
    others = {exchange: items for exchange, items in routes.items() if exchange != "dense"}
    yield from go({**others, carrier: [*others[carrier], one]})
    torch._foreach_copy_(grads, torch.split(one.grad, [len(g) for g in grads]))  # one call, and on a GPU one kernel


def _carrier(routes: Routes, world: World) -> str | None:
    """The exchange to ride with, if all that goes dense may: half of them would spare no collective."""
    items = routes.get("dense", ())
    exchange = next((e for e in _CARRIERS if e in routes), None)
    if exchange is None or not items or sum(item.grad.nbytes for item in items) > MOST:
        return None
    if not all(item.codec.lossless and not item.memory.old for item in items):
        return None
    more = [EXCHANGES[e].wire_bytes(items[0].codec, _spec(items), world.size) for e in (exchange, "dense")]
    return exchange if more[0] - more[1] <= MOST_MORE else None


def _spec(items: Sequence[LayerTask]) -> LayerSpec:
    first = items[0].spec
    return LayerSpec(first.name, (sum(item.spec.numel for item in items),), first.dtype, first.device)


def _side_by_side(items: Sequence[LayerTask], meter: Meter) -> LayerTask:
    """As one layer; its gradient is of any content."""
    first, spec = items[0], _spec(items)
    grad = first.arena.empty(spec.shape, first.grad.dtype, first.grad.device)
    return LayerTask(spec, first.codec, grad, Memory({}, {}), first.seeds, meter, Memory({}, {}))
