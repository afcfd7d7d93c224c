"""Buckets that go as they are: what of them is alike in every step, so that it is not worked out anew in each.

To sort a bucket's parameters by route takes time for each of them, in the thread of the backward pass: of a small model
on a fast link that is what can be lost against plain DDP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from commlib.collective import Payers, Rounds
from commlib.compressor import Compressor
from commlib.exchange import dense
from commlib.exchange.item import Item, World
from commlib.route import Plan, Route


@dataclasses.dataclass(frozen=True)
class PlainBucket:
    """One of DDP's buckets, all of whose parameters are sent as they are by plan.

    Attributes:
        plan: in force.
        parameters: their ``id``s, in order.
        dtype: of the gradients.
        names: of the parameters.
        payers: whose bytes it carries.
    """

    plan: Plan
    parameters: list[int]
    dtype: torch.dtype
    names: list[str]
    payers: Payers

    @classmethod
    def of(
        cls, plan: Plan, parameters: Sequence[Tensor], names: list[str], items: Sequence[Item]
    ) -> PlainBucket | None:
        """This bucket, if it is one, and will be while the plan is in force.

        Args:
            plan: in force, without a hierarchy.
            parameters: DDP's.
            names: of theirs.
            items: as they are exchanged in this step.
        """
        if any(item.memory.old for item in items) or not all(_stays_plain(plan.layers[n].route) for n in names):
            return None
        payers = dense.plain_payers(items)
        return cls(plan, [id(p) for p in parameters], items[0].grad.dtype, names, payers)

    def fits(self, plan: Plan, parameters: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """Whether it is still what DDP hands out: it fills its buckets anew after the first step."""
        return plan is self.plan and dtype == self.dtype and [id(p) for p in parameters] == self.parameters

    def rounds(self, buffer: Tensor, world: World) -> Rounds:
        """As :func:`commlib.exchange.dense.rounds` of its items."""
        for meter, nbytes in self.payers:
            meter.would_send(nbytes, world.size)
        yield from dense.whole(self.payers, world, buffer)


def _stays_plain(route: Route) -> bool:
    return route.exchange == "dense" and route.codec.lossless and type(route.codec).at is Compressor.at
