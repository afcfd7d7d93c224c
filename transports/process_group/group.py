"""Calls that copy, with the arguments and results that PyTorch gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.transports.process_group.algorithms import choice, copy
from commlib.transports.process_group.algorithms.steps import cut

from .arguments import Parts, check, kind, lengths, one, shares, text
from .base import Calls, Part
from .host_tensors import Flat, flats
from .reduce_ops import nbytes
from .work import Work


class Copies(Calls):
    """Values as they are, where they are wanted; and the barrier, of none."""

    def broadcast(self, tensors: Parts, opts: Any = None) -> Work:
        """``opts.rootRank``'s to all."""
        opts = opts or dist.BroadcastOptions()
        root = opts.rootRank
        own = self._place.rank == root
        flat = Flat(one(tensors), read=own)
        around = choice.broadcast_around(self.line, self._place.size, flat.values.nbytes)
        schedule = (copy.broadcast_chain if around else copy.broadcast)(self._place, flat.values, root)
        part = Part(f"broadcast({text(flat.values)}, of rank {root})", schedule, [flat], [] if own else [flat])
        return self._call([part], tensors, opts)

    def allgather(self, outputs: Sequence[Parts], inputs: Parts, opts: Any = None) -> Work:
        """``outputs[0][p]`` ← rank p's ``inputs[0]``."""
        outs = flats(one(outputs), read=False)
        return self._call([self._all_gather(outs, [o.values for o in outs], one(inputs))], one(outputs), opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """``output``, P times as large ← all ranks' ``input``, one after another."""
        return self.all_gather_single_coalesced([output], [input], opts)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, outputs: Parts, inputs: Parts, opts: Any = None) -> Work:
        """Several of these."""
        parts = []
        for output, input in zip(outputs, inputs, strict=True):
            out = Flat(output, read=False)
            parts.append(self._all_gather([out], shares(out.values, self._place.size, input.numel()), input))
        return self._call(parts, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[Parts], inputs: Parts, opts: Any = None) -> Work:
        """``outputs[p][i]`` ← rank p's ``inputs[i]``."""
        parts = []
        for i, input in enumerate(inputs):
            outs = flats([o[i] for o in outputs], read=False)
            parts.append(self._all_gather(outs, [o.values for o in outs], input))
        return self._call(parts, [t for o in outputs for t in o], opts)

    def _all_gather(self, fills: Sequence[Flat], outs: Parts, input: Tensor) -> Part:
        own = Flat(input)
        check("all_gather", outs, own.values, self._place.rank, self._place.size)
        around = choice.gather_around(self.line, self._place.size, nbytes(outs) // len(outs))
        schedule = (copy.all_gather_ring if around else copy.all_gather)(self._place, outs, own.values)
        return Part(f"all_gather({sum(map(len, outs))} × {kind(own.values.dtype)})", schedule, [own], fills)

    def gather(self, outputs: Sequence[Parts], inputs: Parts, opts: Any = None) -> Work:
        """``outputs[0][p]`` on ``opts.rootRank`` ← rank p's ``inputs[0]``."""
        opts = opts or dist.GatherOptions()
        root, own = opts.rootRank, Flat(one(inputs))
        outs = flats(one(outputs), read=False) if self._place.rank == root else []
        parts = [o.values for o in outs]
        if self._place.rank == root:
            check("gather", parts, own.values, root, self._place.size)
        schedule = copy.gather(self._place, parts, own.values, root)
        result = [t for o in outputs for t in o]
        part = Part(f"gather({kind(own.values.dtype)}, to rank {root})", schedule, [own], outs)
        return self._call([part], result, opts)

    def scatter(self, outputs: Parts, inputs: Sequence[Parts], opts: Any = None) -> Work:
        """``outputs[0]`` ← ``inputs[0][rank]`` of ``opts.rootRank``."""
        opts = opts or dist.ScatterOptions()
        root, out = opts.rootRank, Flat(one(outputs), read=False)
        ins = flats(one(inputs)) if self._place.rank == root else []
        parts = [f.values for f in ins]
        if self._place.rank == root:
            check("scatter", parts, out.values, root, self._place.size)
        schedule = copy.scatter(self._place, out.values, parts, root)
        return self._call(
            [Part(f"scatter({kind(out.values.dtype)}, of rank {root})", schedule, ins, [out])], outputs, opts
        )

    def alltoall(self, outputs: Parts, inputs: Parts, opts: Any = None) -> Work:
        """``outputs[p]`` ← rank p's ``inputs[rank]``."""
        outs, ins = flats(outputs, read=False), flats(inputs)
        return self._all_to_all(outs, [o.values for o in outs], ins, [f.values for f in ins], outputs, opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: Sequence[int], splits: Sequence[int], opts: Any = None
    ) -> Work:
        """The same, of one tensor cut along dimension 0: evenly, if no splits are given."""
        out, whole, size = Flat(output, read=False), Flat(input), self._place.size
        outs = cut(out.values, lengths(output, out_splits, size))
        parts = cut(whole.values, lengths(input, splits, size))
        return self._all_to_all([out], outs, [whole], parts, [output], opts)

    all_to_all_single = alltoall_base

    def _all_to_all(
        self, fills: Sequence[Flat], outs: Parts, reads: Sequence[Flat], parts: Parts, result: Parts, opts: Any
    ) -> Work:
        rank, size = self._place.rank, self._place.size
        check("all_to_all", parts, parts[rank] if len(parts) == size else parts[0], rank, size)
        check("all_to_all", outs, parts[rank], rank, size)
        schedule = copy.all_to_all(self._place, outs, parts)
        return self._call([Part(f"all_to_all({kind(parts[0].dtype)})", schedule, reads, fills)], result, opts)

    def barrier(self, opts: Any = None) -> Work:
        """Through once all ranks have come."""
        outs = list(torch.zeros(self._place.size, 1, dtype=torch.uint8).unbind())
        schedule = copy.all_gather(self._place, outs, torch.zeros(1, dtype=torch.uint8))
        return self._call([Part("barrier()", schedule, [], [])], [], opts)
