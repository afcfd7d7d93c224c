"""To owners: stripes are FSDP2's, what is decoded is added in rank order, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.codecs.base import LayerSpec, Memory, Seeds
from commlib.codecs.registry import make
from commlib.exchange import reduce_scatter
from commlib.exchange.collectives import AllToAll
from commlib.exchange.layer_task import LayerTask
from commlib.exchange.reduce_scatter import ReduceScatter
from commlib.groups.world import World
from commlib.planning.route import Route, resolve
from commlib.telemetry.stats import Meter
from tests.support.tiny_ddp import Meeting

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@given(shapes=SHAPES, world=st.integers(1, 6))
def test_rows_are_what_fsdp2_copies_gradients_into(shapes: list[tuple[int, ...]], world: int) -> None:
    specs = [LayerSpec(f"layer{i}", shape) for i, shape in enumerate(shapes)]
    grads = [torch.randn(shape) for shape in shapes]
    row = reduce_scatter.ReduceScatterLayout.of(specs, world)
    table = torch.full((world, row.length), torch.nan)
    torch._chunk_cat(grads, dim=0, num_chunks=world, out=table)  # FSDP2's
    for spec, grad, start in zip(specs, grads, row.starts, strict=True):
        for rank, stripe in enumerate(reduce_scatter.chunks(spec, world)):
            found = table[rank, start : start + stripe.spec.numel].view(stripe.spec.shape)
            assert torch.equal(found, grad[stripe.start : stripe.stop])
        assert reduce_scatter.chunks(spec, world)[-1].stop == spec.shape[0]


def exchanged(
    rule: str, shapes: list[tuple[int, ...]], grads: list[list[torch.Tensor]], memory: list[list[Memory]], step: int
) -> list[torch.Tensor]:
    """What every rank owns of the mean, by ranks in this process."""
    world, specs = len(grads), [LayerSpec(f"layer{i}", shape) for i, shape in enumerate(shapes)]
    codec, row, meeting = make(rule), reduce_scatter.ReduceScatterLayout.of(specs, world), Meeting(world)
    outs, trips, under_way = [], [], []
    for rank in range(world):
        table = torch.zeros(world, row.length)
        torch._chunk_cat(grads[rank], dim=0, num_chunks=world, out=table)
        items = [
            LayerTask(s, codec, table, memory[rank][i], Seeds(0, step, s.name), Meter(table.device), Memory({}, {}))
            for i, s in enumerate(specs)
        ]
        outs.append(torch.full((row.length,), torch.nan))
        trips.append(ReduceScatter().rounds(items, table, outs[-1], World(rank, world), 1 / world))
        under_way.append(next(trips[-1]))
    for (call,) in under_way:
        assert isinstance(call, AllToAll)
        call.issue(meeting)
    for trip in trips:
        assert next(trip, None) is None
    return outs


def assembled(shapes: list[tuple[int, ...]], outs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Layers of what ranks own."""
    specs = [LayerSpec("layer", shape) for shape in shapes]
    row = reduce_scatter.ReduceScatterLayout.of(specs, len(outs))
    return [
        torch.cat(
            [
                out[start : start + stripe.spec.numel].view(stripe.spec.shape)
                for out, stripe in zip(outs, reduce_scatter.chunks(spec, len(outs)), strict=True)
            ]
        )
        for spec, start in zip(specs, row.starts, strict=True)
    ]


@pytest.mark.parametrize("rule", ["onebit", "int8", "topk:ratio=0.2", "sign", "int4", "bf16:ef=on", "dgc:ratio=0.2"])
@given(shapes=SHAPES, world=st.integers(1, 4), seed=st.integers(0, 99))
def test_what_was_sent_and_what_is_held_add_up_to_the_mean(
    rule: str, shapes: list[tuple[int, ...]], world: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codec = make(rule)
    specs = [LayerSpec(f"layer{i}", shape) for i, shape in enumerate(shapes)]
    memory = [[Memory.zeros(codec, spec) for spec in specs] for _ in range(world)]
    sent = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    true = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for step in range(3):
        grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(world)]
        for i, layer in enumerate(assembled(shapes, exchanged(rule, shapes, grads, memory, step))):
            sent[i] += layer
            true[i] += sum(grads[rank][i].double() for rank in range(world)) / world
    if rule.startswith("dgc"):
        return  # it sends a momentum; that its memory is cut by rows, with nothing left out, has been seen
    for i in range(len(shapes)):
        held = sum(memory[rank][i].new["residual"].double() for rank in range(world)) / world
        torch.testing.assert_close(sent[i] + held, true[i], rtol=0, atol=1e-5)


@given(shapes=SHAPES, world=st.integers(1, 4))
def test_uncompressed_is_the_mean_added_in_rank_order(shapes: list[tuple[int, ...]], world: int) -> None:
    nothing = [[Memory({}, {}) for _ in shapes] for _ in range(world)]
    grads = [[torch.randn(shape) for shape in shapes] for _ in range(world)]
    for i, layer in enumerate(assembled(shapes, exchanged("none", shapes, grads, nothing, 0))):
        added = grads[0][i] * (1 / world)
        for rank in range(1, world):
            added = added + grads[rank][i] * (1 / world)
        assert torch.equal(layer, added)


def test_a_codec_whose_memory_has_no_rows_is_refused() -> None:
    assert "cannot be shared out by rows" in (ReduceScatter().refuse(make("powersgd"), LayerSpec("w", (64, 64))) or "")
    assert ReduceScatter().refuse(make("onebit"), LayerSpec("w", (64, 64))) is None
    assert "scalar" in (ReduceScatter().refuse(make("onebit"), LayerSpec("w", ())) or "")


def test_replicas_cannot_take_it() -> None:
    with pytest.raises(ValueError, match=r"sharded models \(FSDP2\) only"):
        resolve("onebit@reduce_scatter", 2)
    with pytest.raises(ValueError, match=r"sharded models \(FSDP2\) only"):
        resolve(Route("reduce_scatter", make("onebit")), 2)


def test_wire_bytes_are_those_of_the_rank_that_sends_most() -> None:
    spec = LayerSpec("w", (5, 8))  # 3 + 2 rows on two ranks: the second sends three
    assert ReduceScatter().wire_bytes(make("none"), spec, 2) == 3 * 8 * 4
