"""Calls that add up, with the arguments and results that PyTorch gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from commlib.transports.process_group.algorithms import choice, sparse
from commlib.transports.process_group.algorithms import reduce as reduce_steps

from .arguments import Parts, check, kind, one, shares, text
from .base import Calls, Part
from .host_tensors import Flat, Sparse, flats, joined
from .reduce_ops import fold, nbytes
from .work import Work

_ALL_REDUCE = {
    "straight": reduce_steps.all_reduce,
    "two_shot": reduce_steps.all_reduce_two_shot,
    "ring": reduce_steps.all_reduce_ring,
}


class Sums(Calls):
    """Sums, and what else ``opts.reduceOp`` may say."""

    def allreduce(self, tensors: Parts, opts: Any = None) -> Work:
        """One tensor, summed (or what else ``opts.reduceOp`` says) in place. A sparse one is summed only."""
        opts, tensor = opts or dist.AllreduceOptions(), one(tensors)
        part = self._all_reduce_sparse(tensor, opts) if tensor.is_sparse else self._all_reduce([tensor], opts)
        return self._call([part], tensors, opts)

    def allreduce_coalesced(self, tensors: Parts, opts: Any = None) -> Work:
        """Several tensors of one dtype at once."""
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._call([self._all_reduce(tensors, opts)], tensors, opts)

    def _all_reduce(self, tensors: Parts, opts: Any) -> Part:
        held = joined(tensors)
        whole = held.values
        name, how = fold(opts.reduceOp, whole.dtype, self._place.size)
        schedule = _ALL_REDUCE[choice.all_reduce(self.line, self._place.size, whole.nbytes)]
        return Part(f"all_reduce({text(whole)}, {name})", schedule(self._place, whole, how), [held], [held])

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> Part:
        held = Sparse(tensor)
        name, _ = fold(opts.reduceOp, tensor.dtype, self._place.size)
        if name != "sum":
            raise ValueError(f"sparse tensors are summed, there is no {name} of them")
        schedule = sparse.all_reduce(self._place, held.own, held.filled)
        return Part(f"all_reduce(sparse {tuple(tensor.shape)}, {kind(tensor.dtype)}, sum)", schedule, [held], [held])

    def reduce(self, tensors: Parts, opts: Any = None) -> Work:
        """Summed on ``opts.rootRank``."""
        opts = opts or dist.ReduceOptions()
        out, root = Flat(one(tensors)), opts.rootRank
        name, how = fold(opts.reduceOp, out.values.dtype, self._place.size)
        around = choice.broadcast_around(self.line, self._place.size, out.values.nbytes)
        schedule = (reduce_steps.reduce_chain if around else reduce_steps.reduce)(self._place, out.values, root, how)
        what = f"reduce({text(out.values)}, {name}, to rank {root})"
        return self._call([Part(what, schedule, [out], [out] if self._place.rank == root else [])], tensors, opts)

    def reduce_scatter(self, outputs: Parts, inputs: Sequence[Parts], opts: Any = None) -> Work:
        """``outputs[0]`` ← the sum of all ranks' ``inputs[0][rank]``."""
        opts = opts or dist.ReduceScatterOptions()
        ins = flats(one(inputs))
        part = self._reduce_scatter(Flat(one(outputs), read=False), ins, [f.values for f in ins], opts)
        return self._call([part], outputs, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """``output`` ← this rank's part of the sum of all ranks' ``input``, P times as large."""
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Parts, inputs: Parts, opts: Any = None) -> Work:
        """Several of these."""
        opts = opts or dist.ReduceScatterOptions()
        parts = []
        for output, input in zip(outputs, inputs, strict=True):
            whole = Flat(input)
            each = shares(whole.values, self._place.size, output.numel())
            parts.append(self._reduce_scatter(Flat(output, read=False), [whole], each, opts))
        return self._call(parts, outputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(self, out: Flat, reads: Sequence[Flat], parts: Parts, opts: Any) -> Part:
        check("reduce_scatter", parts, out.values, self._place.rank, self._place.size)
        name, how = fold(opts.reduceOp, out.values.dtype, self._place.size)
        around = choice.gather_around(self.line, self._place.size, nbytes(parts) // len(parts))
        schedule = reduce_steps.reduce_scatter_ring if around else reduce_steps.reduce_scatter
        what = f"reduce_scatter({sum(map(len, parts))} × {kind(out.values.dtype)}, {name})"
        return Part(what, schedule(self._place, out.values, parts, how), reads, [out])
