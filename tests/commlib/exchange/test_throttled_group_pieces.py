"""Collectives in pieces come to the same as whole ones; all ranks in this process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.exchange import throttled_group
from commlib.exchange.collectives import AllGather, AllReduce, AllToAll, Collective, Rounds
from commlib.exchange.throttled_group import CollectivePiece
from commlib.planning.simulate import run

SIZES = st.integers(1, 4)
MOST = st.integers(1, 200)


@dataclasses.dataclass
class Rank:
    """A process group that writes down what it is asked for; nothing waits."""

    own: int
    world: int
    asked: list[Collective] = dataclasses.field(default_factory=list)

    def size(self) -> int:
        return self.world

    def rank(self) -> int:
        return self.own

    def allreduce(self, tensors: list[Tensor]) -> None:
        self.asked.append(AllReduce(tensors[0]))

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> None:
        self.asked.append(AllGather(out, tensor))

    def alltoall_base(self, out: Tensor, tensor: Tensor, out_splits: list[int], splits: list[int]) -> None:
        self.asked.append(AllToAll(out, tensor, out_splits, splits, self.own))


def carry_out(groups: list[Rank], cut: list[Any], most: float, smallest: float) -> float:
    """All ranks' pieces, one after another; checks their bytes, and returns those of rank 0."""
    sent = [0.0] * len(groups)

    def rounds(group: Rank, parts: Any) -> Rounds:
        for piece in parts:
            assert isinstance(piece, CollectivePiece)
            piece.start()
            asked = group.asked.pop()
            assert piece.sent == asked.wire_bytes(group.world)
            assert piece.sent <= max(most, smallest)
            yield [asked]
            piece.finish()
            sent[group.own] += piece.sent

    run([rounds(g, parts) for g, parts in zip(groups, cut, strict=True)])  # refuses ranks that cut differently
    return sent[0]


@given(SIZES, st.integers(0, 300), MOST, st.integers(0, 99))
def test_slices_of_an_all_reduce_are_its_sum(world: int, n: int, most: float, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(-99, 99, (n,), generator=gen, dtype=torch.int32) for _ in range(world)]
    total = torch.stack(tensors).sum(0)
    groups = [Rank(r, world) for r in range(world)]
    cut = [throttled_group.all_reduce(g, t, most) for g, t in zip(groups, tensors, strict=True)]
    sent = carry_out(groups, cut, most + 8, 8)  # whole values: one more than would fit, at most
    assert all(torch.equal(t, total.to(t.dtype)) for t in tensors)
    assert sent == pytest.approx(AllReduce(tensors[0]).wire_bytes(world))


@given(SIZES, st.integers(0, 300), MOST, st.integers(0, 99))
def test_slices_of_an_all_gather_come_to_their_places(world: int, n: int, most: float, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    payloads = [torch.randint(0, 255, (n,), generator=gen, dtype=torch.uint8) for _ in range(world)]
    outs = [torch.zeros(world * n, dtype=torch.uint8) for _ in range(world)]
    groups = [Rank(r, world) for r in range(world)]
    cut = [throttled_group.all_gather(g, o, p, most) for g, o, p in zip(groups, outs, payloads, strict=True)]
    sent = carry_out(groups, cut, most + world, world)
    assert all(torch.equal(out, torch.cat(payloads)) for out in outs)
    assert sent == (world - 1) * n


@given(SIZES.flatmap(lambda p: st.lists(st.integers(0, 90), min_size=p, max_size=p)), MOST, st.integers(0, 99))
def test_shares_of_an_all_to_all_come_to_their_places(splits: list[int], most: float, seed: int) -> None:
    world, gen = len(splits), torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 255, (sum(splits),), generator=gen, dtype=torch.uint8) for _ in range(world)]
    outs = [torch.zeros(world * splits[r], dtype=torch.uint8) for r in range(world)]
    groups = [Rank(r, world) for r in range(world)]
    cut = [
        throttled_group.all_to_all(g, o, t, [splits[r]] * world, splits, most)
        for r, (g, o, t) in enumerate(zip(groups, outs, tensors, strict=True))
    ]
    sent = carry_out(groups, cut, most + world, world)
    parts = [torch.split(t, splits) for t in tensors]
    for me, out in enumerate(outs):
        assert torch.equal(out, torch.cat([p[me] for p in parts]))
    assert sent == sum(splits) - splits[0]
