"""Collectives that FSDP2 is given in place of its own: they know their unit, and hand over to
:class:`FsdpCommunicator`.

FSDP2 runs them on the streams it has for that, and treats what they return as through in the order of these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.fsdp.communicator import FsdpCommunicator
from commlib.fsdp.param_groups import ParamGroup


class _Memory:
    """Buffers as FSDP2's own collectives make them. (Its base classes say what is asked for)"""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty([int(n) for n in size], dtype=dtype, device=device)


class GradientReduceScatter(_Memory):
    """A unit's gradients, by the plan; where all of them go as they are, by ``own``, FSDP2's collective."""

    def __init__(self, traffic: FsdpCommunicator, unit: ParamGroup, own: Any) -> None:
        self._traffic, self._unit, self._own = traffic, unit, own
        self._between = unit.replicate_group is not None  # then the plan is for what comes after

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        own = functools.partial(self._own, output_tensor, input_tensor, group, op)
        with self._traffic.timed(self._unit):
            if self._between:
                self._traffic.own(self._unit, "gradients", own)
            elif self._traffic.plain(self._unit, op):
                self._traffic.own(self._unit, "gradients", own)
                self._traffic.reduced(self._unit, input_tensor, output_tensor)
            else:
                self._traffic.to_owners(self._unit, input_tensor, output_tensor, op)


class ParameterAllGather(_Memory):
    """A unit's parameters, by their codecs; any other all-gather than that of all chunks over all shards by ``own``.

    (After a forward pass FSDP2 may keep them sharded over fewer ranks: what it gathers then has been decoded before.)
    """

    def __init__(self, traffic: FsdpCommunicator, unit: ParamGroup, own: Any) -> None:
        self._traffic, self._unit, self._own = traffic, unit, own

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        chunks = sum(math.prod(spec.shape) for spec in self._unit.gathered())
        all_of_them = group.size() == self._unit.shard_group.size() and input_tensor.numel() == chunks
        coded = any(self._traffic.codec_of(name) for name in self._unit.names)
        if coded and all_of_them and input_tensor.is_floating_point():
            self._traffic.values(self._unit, input_tensor, output_tensor)
            return None
        call = functools.partial(self._own, output_tensor, input_tensor, group)
        if async_op:  # who asked for it waits for it
            return call(True)
        self._traffic.own(self._unit, "parameters", call)
        return None


class ReplicaGroup:
    """Stands where HSDP's process group of replicas is: as much of one as ``dist.all_reduce`` asks for.

    Its all-reduce goes by the plan; where all of a unit's gradients go as they are, it is that group's own.
    """

    def __init__(self, traffic: FsdpCommunicator, unit: ParamGroup, group: Any) -> None:
        self._traffic, self._unit, self._group = traffic, unit, group

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> None:
        """All-reduce a tensor: this rank's shard. Through when it returns, so there is no work to wait for."""
        with self._traffic.timed(self._unit):
            if self._traffic.plain(self._unit):
                own = functools.partial(self._all_reduce, tensors, opts)
                self._traffic.own(self._unit, "gradients", own, between=True)
                self._traffic.reduced_across(self._unit, tensors[0])
            else:
                self._traffic.across(self._unit, tensors[0], opts.reduceOp)

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any, later: bool) -> Any:
        work = self._group.allreduce(tensors, opts)
        return work if later else work.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
