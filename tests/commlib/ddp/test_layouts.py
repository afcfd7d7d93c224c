"""A parameter that lies transposed, or channels last, is exchanged as one that does not, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import same


class Net(nn.Module):
    def __init__(self, permuted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(3, 4, 3, bias=False), nn.Linear(16, 12, bias=False)
        if permuted:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.linear.weight = nn.Parameter(self.linear.weight.detach().t().contiguous().t())

    def forward(self, image: Tensor, row: Tensor) -> Tensor:
        loss: Tensor = self.conv(image).square().mean() + self.linear(row).square().mean()
        return loss


def trained(world: World, permuted: bool, rule: str, swap: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Weights in their logical order, and the state dict: with a swap in the middle, if there is one to."""
    ddp = DistributedDataParallel(Net(permuted))
    comm = commlib.attach(ddp, rule, min_size=0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(world.rank)
    for step in range(4):
        if swap and step == 2:
            comm.swap(swap)
        optimizer.zero_grad()
        ddp(torch.randn(2, 3, 6, 6, generator=draws), torch.randn(5, 16, generator=draws)).backward()
        optimizer.step()
    state = comm.state_dict()
    comm.close()
    return [p.detach().clone(memory_format=torch.contiguous_format) for p in ddp.parameters()], state


def both(world: World, rule: str, swap: str) -> tuple[bool, bool]:
    """Whether weights, and residuals, are those of a model that lies in order."""
    (weights, state), (plain, expected) = (trained(world, permuted, rule, swap) for permuted in (True, False))
    dist.barrier()
    return same(weights, plain), same(state["ranks"], expected["ranks"])


@pytest.mark.parametrize(
    ("rule", "swap"),
    [
        *(("topk:ratio=0.1", swap) for swap in ("", "none", "onebit", "fp16:ef=off")),
        *((r, "") for r in ("none", "powersgd:rank=2", "onebit@scatter_gather")),
        *full(*((r, "") for r in ("onebit", "fp16", "int8", "qsgd", "blocks:keep=0.5,staleness=4,block=32"))),
    ],
)
def test_the_order_in_memory_does_not_matter(fleet: Fleet, rule: str, swap: str) -> None:
    for weights, residuals in fleet.run(2, both, rule, swap):
        assert weights
        assert residuals
