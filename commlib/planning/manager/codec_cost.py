"""Cost of a codec on this device: one rank's part of its exchange, timed at two sizes."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from commlib.codecs.memory_store import MemoryStore
from commlib.exchange.collectives import AllReduce
from commlib.groups.world import World
from commlib.messaging.link_model import AlphaBeta
from commlib.planning.route import Route
from commlib.planning.simulate import echo, part

_SHAPES = ((64, 1024), (1024, 2048))
_TIMES = 3
_LONG_S = 0.5  # of all repetitions: no more are made then


@dataclasses.dataclass(frozen=True)
class CodecCost:
    """Cost of one layer's codec by one route, as measured.

    Attributes:
        before: seconds by number of values, of what is computed before anything leaves.
        after: the same of all that is computed later.
        gathers: collectives that bring payloads (all-gathers, all-to-alls), one after another.
        reduces: all-reduces.
    """

    before: AlphaBeta
    after: AlphaBeta
    gathers: int
    reduces: int

    @classmethod
    def from_wire(cls, x: Mapping[str, Any]) -> CodecCost:
        """Read a cost from the output of ``dataclasses.asdict``."""
        return cls(**{**x, "before": AlphaBeta(**x["before"]), "after": AlphaBeta(**x["after"])})


def measure(route: Route, world: World, device: torch.device, clock: Callable[[], float]) -> CodecCost:
    """Time a route's codec for matrices of normal numbers, as if all ranks had sent what this one sends.

    Args:
        route: compressed.
        world: this rank; it decodes as many payloads as there are ranks, where the exchange wants that.
        device: where gradients are.
        clock: seconds, once the device has done what it was given.
    """
    found = [_at(route, shape, world, device, clock) for shape in _SHAPES]
    (small, _, _), (large, gathers, reduces) = found
    sizes = [rows * columns for rows, columns in _SHAPES]
    before, after = (_through((sizes[0], small[i]), (sizes[1], large[i])) for i in (0, 1))
    return CodecCost(before, after, gathers, reduces)


def slowest(costs: list[CodecCost]) -> CodecCost:
    """Cost on the slowest of several ranks."""
    before, after = (
        AlphaBeta(max(line.alpha for line in lines), max(line.beta for line in lines))
        for lines in ([c.before for c in costs], [c.after for c in costs])
    )
    return CodecCost(before, after, costs[0].gathers, costs[0].reduces)


def _at(
    route: Route, shape: tuple[int, int], world: World, device: torch.device, clock: Callable[[], float]
) -> tuple[tuple[float, float], int, int]:
    store = MemoryStore()
    gradient = torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(device)
    times: list[tuple[float, float]] = []
    begun = clock()
    for step in range(_TIMES + 1):  # the first makes the codec's memory
        rounds = part(route, gradient.clone(), store, world, step=step, seed=0)
        seconds, collectives = [], []
        while True:
            start = clock()
            batch = next(rounds, None)
            seconds.append(clock() - start)
            if batch is None:
                break
            collectives += batch
            echo(batch, world.size)
        store.commit()
        times.append((seconds[0], sum(seconds[1:])))
        if step and clock() - begun > _LONG_S:
            break
    reduces = sum(isinstance(c, AllReduce) for c in collectives)
    before, after = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return (before, after), len(collectives) - reduces, reduces


def _through(a: tuple[int, float], b: tuple[int, float]) -> AlphaBeta:
    beta = max(0.0, (b[1] - a[1]) / (b[0] - a[0]))
    return AlphaBeta(max(0.0, a[1] - beta * a[0]), beta)
