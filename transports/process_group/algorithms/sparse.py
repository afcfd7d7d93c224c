"""The sum of sparse tensors: everyone's indices and values go to all, which add them up in the order of ranks.

So the result is the same on all ranks, to the last bit. Nothing here knows beforehand how much the others have: counts
go first, and tell how large the rest is.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from commlib.transports.process_group.algorithms.copy import all_gather
from commlib.transports.process_group.algorithms.steps import Position, Schedule, Step


def all_reduce(place: Position, own: Tensor, into: list[Tensor]) -> Schedule:
    """Appends the sum of all ranks' ``own`` to ``into``, coalesced.

    Args:
        place: this rank among the others.
        own: coalesced, any shape, the same on all ranks; only how many indices it has may differ.
        into: empty.
    """
    count = torch.tensor([own._nnz()], dtype=torch.int64)
    counts = [torch.empty_like(count) for _ in range(place.size)]
    yield from all_gather(place, counts, count)
    lengths = [int(c) for c in counts]
    indices = yield from _of_all(place, own.indices().t(), lengths)
    values = yield from _of_all(place, own.values(), lengths)
    total = torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=True)
    into.append(total.coalesce())


def _of_all(place: Position, rows: Tensor, lengths: Sequence[int]) -> Generator[Step, Tensor | None, Tensor]:
    """All ranks' rows, one behind the other; (n, …) → (Σ n, …)."""
    found = rows.new_empty(sum(lengths), *rows.shape[1:])
    outs = [part.reshape(-1) for part in torch.split(found, list(lengths))]
    yield from all_gather(place, outs, rows.contiguous().view(-1))
    return found
