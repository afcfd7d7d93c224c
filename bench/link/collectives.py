"""The collectives: what each moves, how its bytes are counted, and whether it does what it says.

``bytes`` is the size of the largest buffer a rank holds, as in nccl-tests: the vector of all_reduce, broadcast,
reduce and send_recv; all parts together of all_gather, reduce_scatter, all_to_all, gather and scatter.
*Bus* bytes are those that must cross the busiest link, one way, however it is done: times 2(P−1)/P for
all_reduce; (P−1)/P where a rank's own part stays; 1 for the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Run = Callable[[], object]
# torch 2.13 gave these two new names and warns about the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_MODULUS = 61  # of the test values: sums over thousands of ranks stay exact in float32


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Buffers that an operation works on.

    Attributes:
        source: (values,) this rank's contribution; empty where it has none.
        target: (values,) where its result appears.
        run: does it once, blocking for the CPU, queued for a GPU.
    """

    source: Tensor
    target: Tensor
    run: Run


@dataclasses.dataclass(frozen=True)
class Op:
    """Operation that is measured.

    Attributes:
        name: as torch.distributed calls it.
        factor: ranks → bus bytes over bytes.
        prepare: (values, ranks, rank, device, group) → :class:`Buffers` of zeros; values is a multiple of ranks.
        expected: (values, ranks, rank) → what :func:`fill` must have become in ``target``; None: nothing to see.
    """

    name: str
    factor: Callable[[int], float]
    prepare: Callable[[int, int, int, torch.device, Any], Buffers]
    expected: Callable[[int, int, int], Tensor | None]


def sample(rank: int, values: int) -> Tensor:
    """The test contribution of a rank, whole numbers below 61: every rank and every place has its own."""
    return ((torch.arange(values) * 7 + rank * 13) % _MODULUS).float()


def wrong(op: Op, buffers: Buffers, values: int, ranks: int, rank: int) -> str | None:
    """Fill, run once and compare exactly: None, or what came out wrong on this rank."""
    buffers.target.zero_()
    buffers.source.copy_(sample(rank, values)[: buffers.source.numel()])
    buffers.run()
    want = op.expected(values, ranks, rank)
    if want is None or torch.equal(buffers.target.cpu(), want):
        return None
    bad = int((buffers.target.cpu() != want).nonzero()[0])
    return f"{op.name} of {values} values: value {bad} is {float(buffers.target[bad])}, not {float(want[bad])}"


def _part(rank: int, values: int, ranks: int) -> slice:
    each = values // ranks
    return slice(rank * each, (rank + 1) * each)


def _total(values: int, ranks: int) -> Tensor:
    return torch.stack([sample(r, values) for r in range(ranks)]).sum(0)


def _in_place(call: Callable[[Tensor, Any], object]) -> Callable[[int, int, int, torch.device, Any], Buffers]:
    def prepare(values: int, ranks: int, rank: int, device: torch.device, group: Any) -> Buffers:
        x = torch.zeros(values, device=device)
        return Buffers(x, x, lambda: call(x, group))

    return prepare


def _two(
    source: Callable[[int, int], int], target: Callable[[int, int], int], call: Callable[[Tensor, Tensor, Any], object]
) -> Callable[[int, int, int, torch.device, Any], Buffers]:
    def prepare(values: int, ranks: int, rank: int, device: torch.device, group: Any) -> Buffers:
        x, y = torch.zeros(source(values, ranks), device=device), torch.zeros(target(values, ranks), device=device)
        return Buffers(x, y, lambda: call(y, x, group))

    return prepare


def _all(values: int, ranks: int) -> int:
    return values


def _share(values: int, ranks: int) -> int:
    return values // ranks


def _prepare_gather(values: int, ranks: int, rank: int, device: torch.device, group: Any) -> Buffers:
    x, y = torch.zeros(values // ranks, device=device), torch.zeros(values if rank == 0 else 0, device=device)
    parts = list(y.chunk(ranks)) if rank == 0 else None
    return Buffers(x, y, lambda: dist.gather(x, parts, dst=0, group=group))


def _prepare_scatter(values: int, ranks: int, rank: int, device: torch.device, group: Any) -> Buffers:
    x, y = torch.zeros(values if rank == 0 else 0, device=device), torch.zeros(values // ranks, device=device)
    parts = list(x.chunk(ranks)) if rank == 0 else None
    return Buffers(x, y, lambda: dist.scatter(y, parts, src=0, group=group))


def _prepare_send(values: int, ranks: int, rank: int, device: torch.device, group: Any) -> Buffers:
    x = torch.zeros(values if rank < 2 else 0, device=device)

    def run() -> None:
        if rank == 0:
            dist.send(x, 1, group=group)
        elif rank == 1:
            dist.recv(x, 0, group=group)

    return Buffers(x, x, run)


def _prepare_barrier(values: int, ranks: int, rank: int, device: torch.device, group: Any) -> Buffers:
    none = torch.zeros(0, device=device)
    ids = [device.index] if device.type == "cuda" else None
    return Buffers(none, none, lambda: dist.barrier(group, device_ids=ids))


def _gathered(values: int, ranks: int) -> Tensor:
    return torch.cat([sample(r, values)[: values // ranks] for r in range(ranks)])


def _swapped(values: int, ranks: int, rank: int) -> Tensor:
    return torch.cat([sample(r, values)[_part(rank, values, ranks)] for r in range(ranks)])


def _kept(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one(ranks: int) -> float:
    return 1.0


OPS = {
    op.name: op
    for op in (
        Op(
            "all_reduce",
            lambda ranks: 2 * (ranks - 1) / ranks,
            _in_place(lambda x, g: dist.all_reduce(x, group=g)),
            lambda n, ranks, rank: _total(n, ranks),
        ),
        Op(
            "all_gather",
            _kept,
            _two(_share, _all, lambda y, x, g: _all_gather(y, x, group=g)),
            lambda n, ranks, rank: _gathered(n, ranks),
        ),
        Op(
            "reduce_scatter",
            _kept,
            _two(_all, _share, lambda y, x, g: _reduce_scatter(y, x, group=g)),
            lambda n, ranks, rank: _total(n, ranks)[_part(rank, n, ranks)],
        ),
        Op(
            "all_to_all",
            _kept,
            _two(_all, _all, lambda y, x, g: dist.all_to_all_single(y, x, group=g)),
            _swapped,
        ),
        Op(
            "broadcast",
            _one,
            _in_place(lambda x, g: dist.broadcast(x, 0, group=g)),
            lambda n, ranks, rank: sample(0, n),
        ),
        Op(
            "reduce",
            _one,
            _in_place(lambda x, g: dist.reduce(x, 0, group=g)),
            lambda n, ranks, rank: _total(n, ranks) if rank == 0 else None,
        ),
        Op("gather", _kept, _prepare_gather, lambda n, ranks, rank: _gathered(n, ranks) if rank == 0 else None),
        Op("scatter", _kept, _prepare_scatter, lambda n, ranks, rank: sample(0, n)[_part(rank, n, ranks)]),
        Op("send_recv", _one, _prepare_send, lambda n, ranks, rank: sample(0, n) if rank < 2 else None),
        Op("barrier", lambda ranks: 0.0, _prepare_barrier, lambda n, ranks, rank: None),
    )
}
"""Name → operation, in the order of the tables. All roots are rank 0; send_recv goes from rank 0 to rank 1."""
