"""Buckets that go as they are: what of them is alike in every step, so that it is not worked out anew in each.

To sort a bucket's parameters by route takes time for each of them, in the thread of the backward pass: of a small model
on a fast link that is what can be lost against plain DDP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from commlib.exchange import dense
from commlib.exchange.collectives import AllReduce, Payers, Rounds
from commlib.exchange.layer_task import Item, SharedMeters
from commlib.groups.world import World
from commlib.planning.plan import Plan


@dataclasses.dataclass(frozen=True)
class PlainBucket:
    """One of DDP's buckets, all of whose parameters are sent as they are by plan.

    Attributes:
        plan: in force.
        parameters: their ``id``s, in order.
        dtype: of the gradients.
        names: of the parameters.
        payers: the meter of this bucket, of which its layers have shares.
    """

    plan: Plan
    parameters: list[int]
    dtype: torch.dtype
    names: list[str]
    payers: Payers

    def fits(self, plan: Plan, parameters: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """Whether it is still what DDP hands out: it fills its buckets anew after the first step."""
        return plan is self.plan and dtype == self.dtype and [id(p) for p in parameters] == self.parameters

    def mean(self, buffer: Tensor, world: World) -> AllReduce:
        """As :func:`commlib.exchange.dense.rounds` of its items: the one collective that they are."""
        ((meter, nbytes),) = self.payers
        meter.would_send(nbytes, world.size)
        return dense.mean(buffer, world, self.payers)

    def rounds(self, buffer: Tensor, world: World) -> Rounds:
        """The same as an exchange."""
        yield [self.mean(buffer, world)]


class PlainBuckets:
    """Those that are known, by DDP's index. A bucket keeps its meter for good, through whatever plans.

    Args:
        meters: of layers that travel as one.
    """

    def __init__(self, meters: SharedMeters) -> None:
        self._known: dict[int, PlainBucket] = {}
        self._meters = meters

    def find(self, bucket: Any, plan: Plan) -> PlainBucket | None:
        """What is known of a bucket of DDP's, if it still is what it was."""
        plain = self._known.get(bucket.index())
        if plain is None or not plain.fits(plan, bucket.parameters(), bucket.buffer().dtype):
            return None
        return plain

    def note(self, bucket: Any, plan: Plan, items: Sequence[Item]) -> None:
        """Keep this bucket, if it is plain and will be while the plan is in force.

        Args:
            bucket: DDP's.
            plan: in force, without a hierarchy.
            items: the bucket's, as they are exchanged in this step.
        """
        self._known.pop(bucket.index(), None)
        names = [item.spec.name for item in items]
        if any(item.memory.old for item in items) or not all(plan.layers[n].route.plain for n in names):
            return
        payers = [(self._meters.of(items), sum(item.spec.nbytes for item in items))]
        parameters = [id(p) for p in bucket.parameters()]
        self._known[bucket.index()] = PlainBucket(plan, parameters, bucket.buffer().dtype, names, payers)
