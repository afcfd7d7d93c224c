"""All ranks of an exchange in one process: the same code, with the collectives carried out in memory.

For property tests and for trying out a codec without a launcher::

    means = exchange_once("onebit@scatter_gather", gradients)   # one gradient a rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from commlib.codecs.base import Seeds
from commlib.codecs.memory_store import MemoryStore
from commlib.exchange import two_level
from commlib.exchange.collectives import AllGather, AllReduce, AllToAll, Among, Collective, PushPull, Rounds, scope_of
from commlib.exchange.hierarchy import Hierarchy, share
from commlib.exchange.layer_task import LayerTask
from commlib.exchange.registry import EXCHANGES
from commlib.groups.world import World
from commlib.planning.route import Route, Rule, resolve
from commlib.runtime.layers import LayerSpec
from commlib.telemetry.stats import Meter

T = TypeVar("T", AllReduce, AllGather, AllToAll, PushPull)


def run(ranks: Sequence[Rounds], local: int = 1) -> None:
    """Drives one exchange per rank to its end, round by round.

    Args:
        ranks: one exchange a rank.
        local: ranks on each node, which are neighbours in rank order.

    Raises:
        ValueError: the ranks ask for different collectives, or one of them ends before the others.
    """
    while True:
        batches = [next(r, None) for r in ranks]
        if all(b is None for b in batches):
            return
        if any(b is None for b in batches) or len({len(b or ()) for b in batches}) > 1:
            raise ValueError("the ranks issue different numbers of collectives: a real group would hang here")
        for calls in zip(*(b for b in batches if b is not None), strict=True):
            for part in _parts(calls, local):
                _carry_out(part)


def exchange_once(
    rule: Rule,
    gradients: Sequence[Tensor],
    *,
    stores: Sequence[MemoryStore] | None = None,
    step: int = 0,
    seed: int = 0,
    local: int = 1,
) -> list[Tensor]:
    """Exchange one layer once, on as many simulated ranks as there are gradients.

    Args:
        rule: spec string, Compressor or Route.
        gradients: one a rank, equal shapes and dtypes; not modified.
        stores: one a rank, for codecs with memory; committed. Fresh ones by default.
        step: seeds random codecs, together with ``seed``.
        seed: see :class:`commlib.HookState`.
        local: ranks on each node, neighbours in rank order; more than one is a hierarchy, in which the rule goes
            between nodes. Divides the number of gradients.

    Returns:
        What each rank holds afterwards: the mean as the codec transmits it.
    """
    size = len(gradients)
    stores = stores or [MemoryStore() for _ in gradients]
    results = [g.clone().contiguous() for g in gradients]
    nodes = tuple(tuple(range(n, n + local)) for n in range(0, size, local))
    route = resolve(rule, len(nodes))
    trips = []
    for rank, (grad, store) in enumerate(zip(results, stores, strict=True)):
        levels = Hierarchy(nodes, rank) if local > 1 else None
        trips.append(part(route, grad, store, World(rank, size), levels, step=step, seed=seed))
    run(trips, local)
    for store in stores:
        store.commit()
        store.step += 1
    return results


def part(
    route: Route,
    grad: Tensor,
    store: MemoryStore,
    world: World,
    levels: Hierarchy | None = None,
    *,
    step: int,
    seed: int,
) -> Rounds:
    """Simulate one rank's part in exchanging one layer.

    Args:
        route: of the layer.
        grad: its gradient on this rank, contiguous; overwritten by the mean.
        store: of this rank; not committed.
        world: this rank.
        levels: nodes, if the exchange has two levels.
        step: seeds random codecs, together with ``seed``.
        seed: see :class:`commlib.HookState`.
    """
    spec = LayerSpec.of(grad, "layer")
    codec = route.codec.at(step)
    own = share(route, spec, world, levels)
    stripe = route.carrier().owned(codec, own.spec, own.world)
    slots, start = (codec.slots(stripe.spec), own.start + stripe.start) if stripe else ({}, 0)
    memory = store.memory(spec, codec.slots(own.spec), prefix=own.prefix, start=own.start)
    owner = store.owner(spec, slots, start)
    store.drain(spec, grad, world.size, own.world.size)
    seeds, meter = Seeds(seed, step, spec.name), Meter(grad.device)
    item = LayerTask(spec, codec, grad, memory, seeds, meter, owner, overwrite=True)
    if levels is None:
        return EXCHANGES[route.exchange].rounds([item], world, None)
    cuts = {spec.name: levels.cut(route.codec, spec)}
    return two_level.rounds({route.exchange: [item]}, cuts, world, levels.local, levels.inter)


def echo(calls: Sequence[Collective], size: int) -> None:
    """Carries collectives out as if ``size`` ranks had sent what this one does. (Sums stay as they are.)"""
    for c in calls:
        if isinstance(c, AllGather):
            c.out.copy_(c.tensor.repeat(size))
        elif isinstance(c, AllToAll):
            c.out.copy_(torch.split(c.tensor, c.splits)[c.own].repeat(size))


def _parts(calls: Sequence[Collective], local: int) -> list[list[Collective]]:
    """A collective of every rank, as those that each group of ranks carries out by itself."""
    scopes = {scope_of(c) for c in calls}
    if len(scopes) > 1:
        raise ValueError(f"ranks issue collectives of different scopes, {sorted(scopes)}: a real group would hang")
    bare = [c.call if isinstance(c, Among) else c for c in calls]
    if scopes == {"local"}:
        return [bare[i : i + local] for i in range(0, len(bare), local)]
    return [bare[i::local] for i in range(local)] if scopes == {"inter"} else [bare]


def _carry_out(calls: Sequence[Collective]) -> None:
    first = calls[0]
    if isinstance(first, AllReduce):
        total = torch.stack([_as(AllReduce, c).tensor for c in calls]).sum(0)
        for c in calls:
            _as(AllReduce, c).tensor.copy_(total)
    elif isinstance(first, PushPull):
        total = torch.stack([_as(PushPull, c).tensor for c in calls]).sum(0)
        for c in calls:
            _as(PushPull, c).out.copy_(total)
    elif isinstance(first, AllGather):
        everything = torch.cat([_as(AllGather, c).tensor for c in calls])
        for c in calls:
            _as(AllGather, c).out.copy_(everything)
    else:
        parts = [torch.split(_as(AllToAll, c).tensor, _as(AllToAll, c).splits) for c in calls]
        for me, c in enumerate(calls):
            c = _as(AllToAll, c)
            if c.out_splits != [len(p[me]) for p in parts]:
                raise ValueError(
                    f"rank {me} expects {c.out_splits} bytes, the others send {[len(p[me]) for p in parts]}"
                )
            c.out.copy_(torch.cat([p[me] for p in parts]))


def _as(kind: type[T], call: Collective) -> T:
    if not isinstance(call, kind):
        raise ValueError(f"one rank issues {kind.__name__}, another {type(call).__name__}: a real group would hang")
    return call
