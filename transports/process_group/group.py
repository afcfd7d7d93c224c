"""Process group ``zmq`` of torch.distributed: calls that copy and calls that add up, by schedules of sends and
receives.

The schedules are in :mod:`commlib.transports.process_group.algorithms`; arguments and results are PyTorch's.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from commlib.transports.process_group.algorithms import choice, copy, sparse
from commlib.transports.process_group.algorithms import reduce as reduce_steps
from commlib.transports.process_group.algorithms.steps import cut

from .arguments import Parts, check, kind, lengths, listed, member, one, options, shares, text
from .base import GroupCalls, ScheduledCollective, never_compiled
from .host_tensors import HostTensor, SparseHostTensor, flats, joined
from .p2p import Mailbox
from .reduce_ops import fold, nbytes
from .work import CollectiveWork

_AllgatherOptions: Any = vars(distributed_c10d)["AllgatherOptions"]
_ALL_REDUCE = {
    "straight": reduce_steps.all_reduce,
    "two_shot": reduce_steps.all_reduce_two_shot,
    "ring": reduce_steps.all_reduce_ring,
}


@never_compiled
class ReduceCollectives(GroupCalls):
    """Sums, and what else ``opts.reduceOp`` may say."""

    def allreduce(self, tensors: Parts, opts: Any = None, timeout: Any = None, *, op: Any = None) -> CollectiveWork:
        """Sum a tensor in place (or what else ``opts.reduceOp`` says). A sparse one is summed only."""
        opts, tensor = options(dist.AllreduceOptions, opts, timeout, reduceOp=op), one(tensors)
        part = self._all_reduce_sparse(tensor, opts) if tensor.is_sparse else self._all_reduce([tensor], opts)
        return self._call([part], [tensor], opts)

    def allreduce_coalesced(self, tensors: Parts, opts: Any = None) -> CollectiveWork:
        """Several tensors of one dtype at once."""
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._call([self._all_reduce(tensors, opts)], tensors, opts)

    def _all_reduce(self, tensors: Parts, opts: Any) -> ScheduledCollective:
        held = joined(tensors)
        whole = held.values
        name, how = fold(opts.reduceOp, whole.dtype, self._place.size)
        schedule = _ALL_REDUCE[choice.all_reduce(self.line, self._place.size, whole.nbytes)]
        return ScheduledCollective(
            f"all_reduce({text(whole)}, {name})", schedule(self._place, whole, how), [held], [held]
        )

    def _all_reduce_sparse(self, tensor: Tensor, opts: Any) -> ScheduledCollective:
        held = SparseHostTensor(tensor)
        name, _ = fold(opts.reduceOp, tensor.dtype, self._place.size)
        if name != "sum":
            raise ValueError(f"sparse tensors are summed, there is no {name} of them")
        schedule = sparse.all_reduce(self._place, held.own, held.filled)
        return ScheduledCollective(
            f"all_reduce(sparse {tuple(tensor.shape)}, {kind(tensor.dtype)}, sum)", schedule, [held], [held]
        )

    def reduce(
        self, tensors: Parts, opts: Any = None, op: Any = None, timeout: Any = None, *, root: Any = None
    ) -> CollectiveWork:
        """Sum a tensor on ``opts.rootRank``."""
        opts = options(dist.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        root, tensor = member("reduce", opts.rootRank, self._place.size), one(tensors)
        out = HostTensor(tensor)
        name, how = fold(opts.reduceOp, out.values.dtype, self._place.size)
        around = choice.broadcast_around(self.line, self._place.size, out.values.nbytes)
        schedule = (reduce_steps.reduce_chain if around else reduce_steps.reduce)(self._place, out.values, root, how)
        what = f"reduce({text(out.values)}, {name}, to rank {root})"
        return self._call(
            [ScheduledCollective(what, schedule, [out], [out] if self._place.rank == root else [])], [tensor], opts
        )

    def reduce_scatter(
        self, outputs: Parts, inputs: Sequence[Parts], opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> CollectiveWork:
        """``outputs[0]`` ← the sum of all ranks' ``inputs[0][rank]``."""
        opts = options(dist.ReduceScatterOptions, opts, timeout, reduceOp=op)
        ins, out = flats(listed(inputs)), one(outputs)
        part = self._reduce_scatter(HostTensor(out, read=False), ins, [f.values for f in ins], opts)
        return self._call([part], [out], opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> CollectiveWork:
        """``output`` ← this rank's part of the sum of all ranks' ``input``, P times as large."""
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Parts, inputs: Parts, opts: Any = None) -> CollectiveWork:
        """Several of these."""
        opts = opts or dist.ReduceScatterOptions()
        parts = []
        for output, input in zip(outputs, inputs, strict=True):
            whole = HostTensor(input)
            each = shares(whole.values, self._place.size, output.numel())
            parts.append(self._reduce_scatter(HostTensor(output, read=False), [whole], each, opts))
        return self._call(parts, outputs, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _reduce_scatter(
        self, out: HostTensor, reads: Sequence[HostTensor], parts: Parts, opts: Any
    ) -> ScheduledCollective:
        check("reduce_scatter", parts, out.values, self._place.rank, self._place.size)
        name, how = fold(opts.reduceOp, out.values.dtype, self._place.size)
        around = choice.gather_around(self.line, self._place.size, nbytes(parts) // len(parts))
        schedule = reduce_steps.reduce_scatter_ring if around else reduce_steps.reduce_scatter
        what = f"reduce_scatter({sum(map(len, parts))} × {kind(out.values.dtype)}, {name})"
        return ScheduledCollective(what, schedule(self._place, out.values, parts, how), reads, [out])


@never_compiled
class CopyCollectives(GroupCalls):
    """Values as they are, where they are wanted; and the barrier, of none."""

    def broadcast(self, tensors: Parts, opts: Any = None, timeout: Any = None, *, root: Any = None) -> CollectiveWork:
        """Send ``opts.rootRank``'s tensor to all."""
        opts, tensor = options(dist.BroadcastOptions, opts, timeout, rootRank=root), one(tensors)
        root = member("broadcast", opts.rootRank, self._place.size)
        own = self._place.rank == root
        flat = HostTensor(tensor, read=own)
        around = choice.broadcast_around(self.line, self._place.size, flat.values.nbytes)
        schedule = (copy.broadcast_chain if around else copy.broadcast)(self._place, flat.values, root)
        part = ScheduledCollective(
            f"broadcast({text(flat.values)}, of rank {root})", schedule, [flat], [] if own else [flat]
        )
        return self._call([part], [tensor], opts)

    def allgather(
        self, outputs: Sequence[Parts], inputs: Parts, opts: Any = None, *, timeout: Any = None
    ) -> CollectiveWork:
        """``outputs[0][p]`` ← rank p's ``inputs[0]``."""
        opts, places = options(_AllgatherOptions, opts, timeout), listed(outputs)
        outs = flats(places, read=False)
        return self._call([self._all_gather(outs, [o.values for o in outs], one(inputs))], places, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> CollectiveWork:
        """``output``, P times as large ← all ranks' ``input``, one after another."""
        return self.all_gather_single_coalesced([output], [input], opts)

    all_gather_single = _allgather_base

    def all_gather_single_coalesced(self, outputs: Parts, inputs: Parts, opts: Any = None) -> CollectiveWork:
        """Several of these."""
        parts = []
        for output, input in zip(outputs, inputs, strict=True):
            out = HostTensor(output, read=False)
            parts.append(self._all_gather([out], shares(out.values, self._place.size, input.numel()), input))
        return self._call(parts, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, outputs: Sequence[Parts], inputs: Parts, opts: Any = None) -> CollectiveWork:
        """``outputs[p][i]`` ← rank p's ``inputs[i]``."""
        parts = []
        for i, input in enumerate(inputs):
            outs = flats([o[i] for o in outputs], read=False)
            parts.append(self._all_gather(outs, [o.values for o in outs], input))
        return self._call(parts, [t for o in outputs for t in o], opts)

    def _all_gather(self, fills: Sequence[HostTensor], outs: Parts, input: Tensor) -> ScheduledCollective:
        own = HostTensor(input)
        check("all_gather", outs, own.values, self._place.rank, self._place.size)
        around = choice.gather_around(self.line, self._place.size, nbytes(outs) // len(outs))
        schedule = (copy.all_gather_ring if around else copy.all_gather)(self._place, outs, own.values)
        return ScheduledCollective(
            f"all_gather({sum(map(len, outs))} × {kind(own.values.dtype)})", schedule, [own], fills
        )

    def gather(
        self, outputs: Sequence[Parts], inputs: Parts, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> CollectiveWork:
        """``outputs[0][p]`` on ``opts.rootRank`` ← rank p's ``inputs[0]``."""
        opts = options(dist.GatherOptions, opts, timeout, rootRank=root)
        root, own = member("gather", opts.rootRank, self._place.size), HostTensor(one(inputs))
        places = listed(outputs) if self._place.rank == root else []
        outs = flats(places, read=False)
        parts = [o.values for o in outs]
        if self._place.rank == root:
            check("gather", parts, own.values, root, self._place.size)
        schedule = copy.gather(self._place, parts, own.values, root)
        part = ScheduledCollective(f"gather({kind(own.values.dtype)}, to rank {root})", schedule, [own], outs)
        return self._call([part], places, opts)

    def scatter(
        self, outputs: Parts, inputs: Sequence[Parts], opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> CollectiveWork:
        """``outputs[0]`` ← ``inputs[0][rank]`` of ``opts.rootRank``."""
        opts, tensor = options(dist.ScatterOptions, opts, timeout, rootRank=root), one(outputs)
        root, out = member("scatter", opts.rootRank, self._place.size), HostTensor(tensor, read=False)
        ins = flats(listed(inputs)) if self._place.rank == root else []
        parts = [f.values for f in ins]
        if self._place.rank == root:
            check("scatter", parts, out.values, root, self._place.size)
        schedule = copy.scatter(self._place, out.values, parts, root)
        return self._call(
            [ScheduledCollective(f"scatter({kind(out.values.dtype)}, of rank {root})", schedule, ins, [out])],
            [tensor],
            opts,
        )

    def alltoall(self, outputs: Parts, inputs: Parts, opts: Any = None) -> CollectiveWork:
        """``outputs[p]`` ← rank p's ``inputs[rank]``."""
        outs, ins = flats(outputs, read=False), flats(inputs)
        return self._all_to_all(outs, [o.values for o in outs], ins, [f.values for f in ins], outputs, opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: Sequence[int], splits: Sequence[int], opts: Any = None
    ) -> CollectiveWork:
        """The same, of one tensor cut along dimension 0: evenly, if no splits are given."""
        out, whole, size = HostTensor(output, read=False), HostTensor(input), self._place.size
        outs = cut(out.values, lengths(output, out_splits, size))
        parts = cut(whole.values, lengths(input, splits, size))
        return self._all_to_all([out], outs, [whole], parts, [output], opts)

    all_to_all_single = alltoall_base

    def _all_to_all(
        self,
        fills: Sequence[HostTensor],
        outs: Parts,
        reads: Sequence[HostTensor],
        parts: Parts,
        result: Parts,
        opts: Any,
    ) -> CollectiveWork:
        rank, size = self._place.rank, self._place.size
        check("all_to_all", parts, parts[rank] if len(parts) == size else parts[0], rank, size)
        check("all_to_all", outs, parts[rank], rank, size)
        schedule = copy.all_to_all(self._place, outs, parts)
        return self._call(
            [ScheduledCollective(f"all_to_all({kind(parts[0].dtype)})", schedule, reads, fills)], result, opts
        )

    def barrier(self, opts: Any = None, *, timeout: Any = None) -> CollectiveWork:
        """Through once all ranks have come."""
        opts = options(dist.BarrierOptions, opts, timeout)
        outs = list(torch.zeros(self._place.size, 1, dtype=torch.uint8).unbind())
        schedule = copy.all_gather(self._place, outs, torch.zeros(1, dtype=torch.uint8))
        return self._call([ScheduledCollective("barrier()", schedule, [], [])], [], opts)


@never_compiled
class ZmqGroup(ReduceCollectives, CopyCollectives):
    """A process group over endpoints.

    Args:
        mail: messages from one rank to another.
        rest: of :class:`~.calls.Calls`.
    """

    def __init__(self, *rest: Any, mail: Mailbox[Any]) -> None:
        GroupCalls.__init__(self, *rest)
        self._mail = mail

    def monitored_barrier(self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier. It names all ranks that do not come in time, as every call does. (``dist``'s is Gloo's only.)"""
        opts = dist.BarrierOptions()
        opts.timeout = timeout or self.options._timeout
        self.barrier(opts).wait()

    def send(self, tensors: Parts, to: int, tag: int) -> CollectiveWork:
        """Send to rank ``to``; through once the tensor may be written to."""
        to = member("send", to, self._place.size)
        return self._shown("send", lambda: self._mail.send(one(tensors), to, tag, self._seconds(None)))

    def recv(self, tensors: Parts, source: int, tag: int) -> CollectiveWork:
        """The next message of rank ``source`` with this tag."""
        source = member("recv", source, self._place.size)
        return self._shown("recv", lambda: self._mail.recv(one(tensors), source, tag, self._seconds(None)))

    def recv_anysource(self, tensors: Parts, tag: int) -> CollectiveWork:
        """The next message with this tag, of any rank."""
        return self._shown("recv_anysource", lambda: self._mail.recv(one(tensors), None, tag, self._seconds(None)))
