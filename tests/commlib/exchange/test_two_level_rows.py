"""Rows beside two levels: layers of one bucket that go flat, and others that are shared out, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.base import LayerSpec, Seeds
from commlib.codecs.slots import Memory
from commlib.exchange import two_level
from commlib.exchange.collectives import Rounds, scope_of
from commlib.exchange.factors.rounds import Again, FactorRounds, First, RowHistory
from commlib.exchange.hierarchy import Hierarchy
from commlib.exchange.lanes import scopes
from commlib.exchange.layer_task import LayerTask
from commlib.exchange.registry import BY_ROWS
from commlib.groups.world import World
from commlib.planning.route import resolve
from commlib.planning.simulate import run
from commlib.telemetry.stats import Meter
from tests.support.tiers import examples
from tests.support.tiny_ddp import Meeting

CPU = torch.device("cpu")
NONE = resolve("none", 2).codec
SHAPE = (6, 5)  # of the layer that sends its rows
OTHERS = {"none": (7, 3), "onebit@gather": (9, 4), "int8:ef=off@scatter_gather": (33,)}


def item(h: Hierarchy, pair: str, grad: Tensor, **more: Any) -> LayerTask:
    """A layer of this gradient; its memory is of this rank's stripe."""
    codec = resolve(pair, 2).codec
    spec = LayerSpec(pair, tuple(grad.shape), **more)
    part = h.share(codec, spec)
    stripe = resolve(pair, 2).carrier().owned(codec, part.spec, part.world)
    owner = Memory.zeros(codec, stripe.spec) if stripe else Memory({}, {})
    return LayerTask(spec, codec, grad, Memory.zeros(codec, part.spec), Seeds(0, 0, pair), Meter(CPU), owner)


def watched(rounds: Rounds, meeting: Meeting, seen: list[set[str]]) -> Rounds:
    """What the simulation carries out; rows meet by themselves."""
    for batch in rounds:
        seen.append({scope_of(c) for c in batch})
        for call in batch:
            if isinstance(call, First | Again):
                call.issue(meeting)
        yield [c for c in batch if not isinstance(c, First | Again)]


@pytest.mark.parametrize("name", BY_ROWS)
@settings(max_examples=examples(40))
@given(
    nodes=st.integers(2, 3),
    local=st.integers(2, 3),
    others=st.lists(st.sampled_from(sorted(OTHERS)), max_size=3, unique=True),
    counts=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    room=st.integers(0, 3),
    late=st.booleans(),
)
def test_in_one_bucket_some_layers_go_by_rows_and_some_over_two_levels(name, nodes, local, others, counts, room, late):
    size = nodes * local
    table = tuple(tuple(range(n * local, (n + 1) * local)) for n in range(nodes))
    gen, start, again = torch.Generator().manual_seed(size), Meeting(size), Meeting(size)
    habits = [RowHistory() for _ in range(size)]
    trips, buckets, true = [], [], []
    for rank, habit in enumerate(habits):
        habit.expect(room)  # too little for some: then they gather again, or sum the matrices
        trip = FactorRounds(BY_ROWS[name].sending(NONE, *SHAPE, World(rank, size)), habit, CPU)
        u, v = (torch.randn(counts[rank], n, generator=gen) for n in SHAPE[::-1])
        trip.load([(u, v)] if counts[rank] else [], False)
        trip.start(start)
        trip.late = late and rank == 1
        grad = torch.randn(SHAPE, generator=gen) if trip.late else torch.zeros(SHAPE)
        rest = [torch.randn(OTHERS[pair], generator=gen) for pair in others]
        trips.append(trip)
        buckets.append([grad, *rest])
        true.append([grad + v.t() @ u, *(g.clone() for g in rest)])
    exchanges: list[Rounds] = []
    seen: list[list[set[str]]] = []
    for rank, (trip, (grad, *rest)) in enumerate(zip(trips, buckets, strict=True)):
        h = Hierarchy(table, rank)
        spec = LayerSpec("l.weight", SHAPE, kind="linear.weight", layer="l")
        nothing = Memory({}, {})
        by_rows = LayerTask(spec, NONE, grad, nothing, Seeds(0, 0, "l"), Meter(CPU), nothing, trip)
        routes = {name: [by_rows]}
        cuts = {}
        for pair, g in zip(others, rest, strict=True):
            x = item(h, pair, g)
            routes.setdefault(resolve(pair, 2).exchange, []).append(x)
            cuts[x.spec.name] = h.cut(x.codec, x.spec)
        seen.append([])
        rounds = two_level.rounds(routes, cuts, World(rank, size), h.local, h.inter)
        exchanges.append(watched(rounds, again, seen[-1]))
    run(exchanges, local)
    for layer in zip(*buckets, strict=True):
        assert all(torch.equal(layer[0], other) for other in layer)
    for i, pair in enumerate([name, *others]):
        if pair in (name, "none"):
            mean = torch.stack([grads[i].double() for grads in true]).mean(0)
            torch.testing.assert_close(buckets[0][i].double(), mean, atol=5e-6, rtol=1e-5)
    assert all(s == seen[0] for s in seen)
    lanes = scopes({"dense", name, *(resolve(p, 2).exchange for p in others)}, Hierarchy(table, 0))
    assert len(seen[0]) <= len(lanes)
    assert all(batch <= set(lane) for batch, lane in zip(seen[0], lanes, strict=False))
