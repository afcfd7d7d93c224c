"""``sparse``: of a gradient of rows, as that of an embedding with ``sparse=True``, which rows, and their values.

Every rank gets every rank's, and adds them up in rank order: so all have the same bits. Nobody knows beforehand how
many rows the others have, and that is what the first round is for; in the second all send as many bytes as the one with
the most rows. Nothing is ever as large as the dense gradient, unless the rows are that many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.codecs.base import Compressor, LayerSpec, Memory
from commlib.exchange.base import Exchange
from commlib.exchange.buffers import Packing
from commlib.exchange.collectives import AllGather, Rounds, lockstep
from commlib.exchange.layer_task import LayerTask
from commlib.groups.world import World

_COUNT = 8  # bytes
_SOME = 8  # rows: a codec says of these what it needs of any number


class SparseExchange(Exchange):
    """All-gather of the rows and values of sparse gradients, merged in rank order."""

    name = "sparse"
    ROUNDS = 2

    def refuse(self, codec: Compressor, spec: LayerSpec) -> str | None:
        """Rows are others in every step, so a codec may keep nothing of them."""
        if not spec.sparse:
            return "its gradient is not sparse"
        rows = of_rows(spec, _SOME)
        if codec.lossless:
            return None
        if codec.slots(rows):
            what = "it keeps a memory of its layer, of a fixed shape, and sparse rows are others in every step"
            return f"{what}: give ef=off"
        if codec.shared_seed:
            return "its ranks draw the same values, and have other rows"
        return codec.refuse(rows)

    def wire_bytes(self, codec: Compressor, spec: LayerSpec, world: int) -> float:
        """Unknown before there are rows: see :func:`row_bytes`."""
        return float("nan")

    def rounds(self, items: Sequence[LayerTask], world: World, buffer: Tensor | None) -> Rounds:
        """Each item's ``grad`` is sparse, of one sparse dimension, and becomes the mean in place, coalesced.

        Divided *before* rows that are there several times are added up, as DDP does: without a codec the result is that
        of DDP over Gloo, to the last bit.
        """
        yield from lockstep([_one(item, world) for item in items])


def of_rows(spec: LayerSpec, count: int) -> LayerSpec:
    """So many rows of the layer as a dense one."""
    return LayerSpec(spec.name, (count, *spec.shape[1:]), spec.dtype, spec.device)


def _one(item: LayerTask, world: World) -> Rounds:
    own = _part(item.grad, world.size)
    indices, values = own.indices()[0], own.values()
    device, kind = values.device, torch.int32 if item.spec.shape[0] < 1 << 31 else torch.int64
    count = torch.tensor([len(indices)], dtype=torch.int64, device=device)
    counts = count.new_empty(world.size)
    yield [AllGather(counts.view(torch.uint8), count.view(torch.uint8), [(item.meter, _COUNT)])]
    lengths: list[int] = counts.tolist()
    packings = [_packing(item, n, kind) for n in lengths]
    total = max(packing.total for packing in packings)
    item.meter.would_gather(max(lengths) * (indices.itemsize + of_rows(item.spec, 1).nbytes) + _COUNT, world.size)
    payload = torch.zeros(total, dtype=torch.uint8, device=device)
    with item.meter.phase("compress"):
        places, coded = packings[world.rank].slices(payload)
        places.view(kind).copy_(indices)
        _encode(item, values, coded, world.rank)
    gathered = torch.empty(world.size * total, dtype=torch.uint8, device=device)
    if total:
        yield [AllGather(gathered, payload, [(item.meter, total)])]
    with item.meter.phase("decompress"):
        found = []
        for rank, (n, packing) in enumerate(zip(lengths, packings, strict=True)):
            places, coded = packing.slices(gathered[rank * total : (rank + 1) * total])
            found.append((places.view(kind).long(), _decode(item, n, coded, rank)))
        item.grad.copy_(merged(found, item.grad))


def merged(parts: Sequence[tuple[Tensor, Tensor]], like: Tensor) -> Tensor:
    """The sum of all ranks' rows, in rank order, coalesced.

    Args:
        parts: of every rank, (n,) int64 different indices and (n, …) values.
        like: a sparse tensor of the sum's shape and dtype.
    """
    rows, places = torch.unique(torch.cat([indices for indices, _ in parts]), return_inverse=True)
    total = torch.zeros(len(rows), *like.shape[1:], dtype=like.dtype, device=rows.device)
    for at, (_, values) in zip(torch.split(places, [len(i) for i, _ in parts]), parts, strict=True):
        total.index_add_(0, at, values.to(like.dtype))  # no index comes twice here: nothing is left to chance
    return torch.sparse_coo_tensor(rows[None], total, like.shape, is_coalesced=True, check_invariants=False)


def _part(grad: Tensor, ranks: int) -> Tensor:
    """This rank's part of the mean, coalesced."""
    part = torch.sparse_coo_tensor(grad._indices(), grad._values() / ranks, grad.shape, check_invariants=False)
    return part.coalesce()


def _packing(item: LayerTask, rows: int, kind: torch.dtype) -> Packing:
    values = item.codec.nbytes(of_rows(item.spec, rows)) if rows else 0
    return Packing([rows * kind.itemsize, values])


def _encode(item: LayerTask, values: Tensor, payload: Tensor, rank: int) -> None:
    if len(values):
        work = values if item.codec.lossless else values.float()
        item.codec.compress(work.contiguous(), payload, memory=Memory({}, {}), seed=item.seeds.of(item.codec, rank))


def _decode(item: LayerTask, rows: int, payload: Tensor, rank: int) -> Tensor:
    spec = of_rows(item.spec, rows)
    dtype = spec.dtype if item.codec.lossless else torch.float32
    out = torch.empty(spec.shape, dtype=dtype, device=payload.device)
    if rows:
        item.codec.decompress(payload, out, seed=item.seeds.of(item.codec, rank))
    return out
