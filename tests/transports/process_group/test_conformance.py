"""Over zmq every collective gives what it gives over Gloo: all of them, random shapes, dtypes, roots and splits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import commlib  # noqa: F401  # registers the backend
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.uint8, torch.int8, torch.int32, torch.int64,
]  # fmt: skip
"""That Gloo adds up."""
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]


class Both:
    """One call over both groups, from the same values."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.alike = random.Random(seed)  # the same on all ranks
        self.own = torch.Generator().manual_seed(1000 * seed + world.rank)
        self.groups = [dist.new_group(backend=b) for b in ("gloo", "zmq")]

    def shape(self) -> tuple[int, ...]:
        """One to three dimensions, mostly small."""
        dims = [self.alike.choice([1, 2, 3, 7, 16, 33]) for _ in range(self.alike.randint(1, 3))]
        return (self.alike.choice([40_000, 300_000]),) if self.alike.random() < 0.1 else tuple(dims)

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Whole numbers, small enough that sums and products are exact in any order."""
        return torch.randint(1, 4, shape, generator=self.own).to(dtype)

    def dtype(self) -> torch.dtype:
        """Any that Gloo has."""
        return self.alike.choice(DTYPES)

    def root(self) -> int:
        """Any rank."""
        return self.alike.randrange(self.world.size)

    def same(self, call: Callable[[Any, list[Tensor]], object], *given: Tensor) -> None:
        """The call leaves the same in copies of these over both."""
        ends = []
        for group in self.groups:
            copies = [t.clone() for t in given]
            asked = self.alike.getstate()
            call(group, copies)
            self.alike.setstate(asked)
            ends.append(copies)
        for gloo, zmq in zip(*ends, strict=True):
            torch.testing.assert_close(zmq, gloo, rtol=0, atol=0)


def all_reduce(b: Both) -> None:
    op = b.alike.choice(OPS)
    b.same(lambda g, t: dist.all_reduce(t[0], op, group=g), b.values(b.shape(), b.dtype()))


def all_reduce_bits(b: Both) -> None:
    op = b.alike.choice([dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR])
    b.same(lambda g, t: dist.all_reduce(t[0], op, group=g), b.values(b.shape(), torch.int32))


def all_reduce_sparse(b: Both) -> None:
    count = b.alike.choice([0, 1, 20]) * b.world.rank
    at = torch.randint(0, 9, (1, count), generator=b.own)
    given = torch.sparse_coo_tensor(at, b.values((count, 4), torch.float32), (9, 4), check_invariants=True)
    b.same(lambda g, t: dist.all_reduce(t[0], group=g), given)


def broadcast(b: Both) -> None:
    root = b.root()
    b.same(lambda g, t: dist.broadcast(t[0], root, group=g), b.values(b.shape(), b.dtype()))


def reduce(b: Both) -> None:
    root, op, given = b.root(), b.alike.choice(OPS), b.values(b.shape(), b.dtype())

    def call(group: Any, t: list[Tensor]) -> None:
        dist.reduce(t[0], root, op, group=group)
        if b.world.rank != root:
            t[0].zero_()  # what is there is nobody's business

    b.same(call, given)


def all_gather(b: Both) -> None:
    shape, dtype = b.shape(), b.dtype()
    outs = [torch.zeros(shape, dtype=dtype) for _ in range(b.world.size)]
    b.same(lambda g, t: dist.all_gather(t[1:], t[0], group=g), b.values(shape, dtype), *outs)


def all_gather_into_tensor(b: Both) -> None:
    shape, dtype = b.shape(), b.dtype()
    out = torch.zeros(b.world.size * shape[0], *shape[1:], dtype=dtype)
    b.same(lambda g, t: dist.all_gather_into_tensor(t[1], t[0], group=g), b.values(shape, dtype), out)


def gather(b: Both) -> None:
    shape, dtype, root = b.shape(), b.dtype(), b.root()
    outs = [torch.zeros(shape, dtype=dtype) for _ in range(b.world.size)] if b.world.rank == root else []
    b.same(lambda g, t: dist.gather(t[0], t[1:] or None, root, group=g), b.values(shape, dtype), *outs)


def scatter(b: Both) -> None:
    shape, dtype, root = b.shape(), b.dtype(), b.root()
    parts = [b.values(shape, dtype) for _ in range(b.world.size)] if b.world.rank == root else []
    b.same(lambda g, t: dist.scatter(t[0], t[1:] or None, root, group=g), torch.zeros(shape, dtype=dtype), *parts)


def reduce_scatter(b: Both) -> None:
    shape, dtype = b.shape(), b.dtype()
    parts = [b.values(shape, dtype) for _ in range(b.world.size)]
    b.same(lambda g, t: dist.reduce_scatter(t[0], t[1:], group=g), torch.zeros(shape, dtype=dtype), *parts)


def reduce_scatter_tensor(b: Both) -> None:
    shape, dtype = b.shape(), b.dtype()
    whole = b.values((b.world.size * shape[0], *shape[1:]), dtype)
    b.same(lambda g, t: dist.reduce_scatter_tensor(t[0], t[1], group=g), torch.zeros(shape, dtype=dtype), whole)


def all_to_all_single(b: Both) -> None:
    n, dtype, width = b.world.size, b.dtype(), b.alike.randint(1, 5)
    rows = [[b.alike.randint(0, 20) for _ in range(n)] for _ in range(n)]
    mine, theirs = rows[b.world.rank], [row[b.world.rank] for row in rows]
    out = torch.zeros(sum(theirs), width, dtype=dtype)
    b.same(
        lambda g, t: dist.all_to_all_single(t[1], t[0], theirs, mine, group=g), b.values((sum(mine), width), dtype), out
    )


def all_to_all_single_evenly(b: Both) -> None:
    shape, dtype = b.shape(), b.dtype()
    given = b.values((b.world.size * shape[0], *shape[1:]), dtype)
    b.same(lambda g, t: dist.all_to_all_single(t[1], t[0], group=g), given, torch.zeros_like(given))


def all_reduce_coalesced(b: Both) -> None:
    dtype = b.dtype()
    given = [b.values(b.shape(), dtype) for _ in range(b.alike.randint(1, 4))]
    b.same(lambda g, t: g.allreduce_coalesced(t).wait(), *given)


def send_and_recv(b: Both) -> None:
    """Everyone to the next, two tags, received the other way round."""
    shape, dtype, size, rank = b.shape(), b.dtype(), b.world.size, b.world.rank

    def call(group: Any, t: list[Tensor]) -> None:
        sends = [dist.isend(t[tag], (rank + 1) % size, group=group, tag=tag) for tag in (0, 1)]
        recvs = [dist.irecv(t[2 + tag], (rank - 1) % size, group=group, tag=tag) for tag in (1, 0)]
        for work in (*recvs, *sends):
            assert work is not None
            work.wait()

    blank = torch.zeros(shape, dtype=dtype)
    b.same(call, b.values(shape, dtype), b.values(shape, dtype), blank, blank)


def recv_of_any(b: Both) -> None:
    shape, dtype, root = b.shape(), b.dtype(), b.root()

    def call(group: Any, t: list[Tensor]) -> None:
        if b.world.rank != root:
            dist.send(t[0], root, group=group)
        for _ in range(b.world.size - 1 if b.world.rank == root else 0):
            came = torch.zeros_like(t[0])
            source = dist.recv(came, group=group)
            t[1 + source].copy_(came)
        dist.barrier()  # or the next one's messages might be taken for this one's

    outs = [torch.zeros(shape, dtype=dtype) for _ in range(b.world.size)]
    b.same(call, b.values(shape, dtype), *outs)


def objects(b: Both) -> None:
    said: list[Any] = [None] * b.world.size
    dist.all_gather_object(said, {"rank": b.world.rank, "x": "y" * b.world.rank}, group=b.groups[1])
    assert [s["rank"] for s in said] == list(range(b.world.size))
    root = b.root()
    told = [{"of": root}] if b.world.rank == root else [None]
    dist.broadcast_object_list(told, root, group=b.groups[1])
    assert told == [{"of": root}]


CASES = [
    all_reduce, all_reduce_bits, all_reduce_sparse, broadcast, reduce, all_gather, all_gather_into_tensor, gather,
    scatter, reduce_scatter, reduce_scatter_tensor, all_to_all_single, all_to_all_single_evenly, all_reduce_coalesced,
    send_and_recv, recv_of_any, objects,
]  # fmt: skip


def conform(world: World, name: str, count: int) -> None:
    both = Both(world, seed=len(name))
    for _ in range(count):
        next(case for case in CASES if case.__name__ == name)(both)
    for group in both.groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [4, *full(2)])
@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_over_zmq_as_over_gloo(fleet: Fleet, name: str, size: int) -> None:
    fleet.run(size, conform, name, 12)


def mixed(world: World, seed: int) -> None:
    both = Both(world, seed)
    for _ in range(60):
        both.alike.choice(CASES)(both)
    for group in both.groups:
        dist.destroy_process_group(group)


def test_one_kind_after_another_in_any_order(fleet: Fleet) -> None:
    fleet.run(3, mixed, 11)
