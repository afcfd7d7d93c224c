"""Bits of PyTorch's own: ``none`` has those of plain DDP, fp16 and bf16 those of its hooks of these names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full

DDP: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]
HOOKED: list[dict[str, Any]] = [
    {},
    *[
        {option: True, "gradient_as_bucket_view": view}
        for option in ("static_graph", "find_unused_parameters")
        for view in (False, True)
    ],
]
"""With an option of these ``none``, too, has a hook: its exchange cannot be seen from outside."""
FORMATS = (torch.contiguous_format, torch.channels_last)
ZEROED = ("none", "zeros", "never")


class Mixed(nn.Module):
    """Convolutions, a matrix of 180,157 values (its payload lies in its gradient's memory) and a bias.

    Args:
        format: of the convolutions' weights.
    """

    def __init__(self, format: torch.memory_format) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.images = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 64, 3))
        self.words = nn.Sequential(nn.Linear(257, 701), nn.Tanh(), nn.Linear(701, 99, bias=False))
        self.to(memory_format=format)  # type: ignore[call-overload]  # torch's stub leaves this out

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, words = batch
        losses: list[Tensor] = [self.images(images).square().mean(), self.words(words).square().mean()]
        return losses[0] + losses[1]


def trained(world: World, hook: Any, format: torch.memory_format, options: dict[str, Any], zeroed: str) -> Tensor:
    """Weights after three steps."""
    model = DistributedDataParallel(Mixed(format), bucket_cap_mb=0.5, **options)
    optimizer, gen, comm = torch.optim.SGD(model.parameters(), 0.05), torch.Generator().manual_seed(world.rank), None
    if isinstance(hook, str):
        comm = commlib.attach(model, hook)
    elif hook is not None:
        model.register_comm_hook(None, hook)
    for _ in range(3):
        batch = torch.randn(2, 3, 9, 9, generator=gen), torch.randn(4, 257, generator=gen)
        if zeroed != "never":
            optimizer.zero_grad(set_to_none=zeroed == "none")
        model(batch).backward()
        optimizer.step()
    if comm is not None:
        comm.close()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def differing(world: World) -> list[str]:
    found = []
    pairs: list[tuple[str, Any]] = [
        ("fp16:ef=off", default_hooks.fp16_compress_hook),
        # PyTorch's by its own name DDP takes over NCCL only.
        ("bf16:ef=off", lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)),
    ]
    for (ours, theirs), *rest in itertools.product(pairs, FORMATS, DDP, ZEROED):
        if not torch.equal(trained(world, ours, *rest), trained(world, theirs, *rest)):
            found.append(f"{ours} {rest}")
    return found


@pytest.mark.parametrize("size", [1, 2, *full(3)])
def test_without_a_residual_weights_are_those_of_pytorchs_own_hooks_to_the_last_bit(fleet: Fleet, size: int) -> None:
    assert fleet.run(size, differing) == [[]] * size


def beside_ddp(world: World) -> dict[str, float]:
    """Largest difference of a weight where ``none`` has other bits than plain DDP."""
    found = {}
    for rest in itertools.product(FORMATS, HOOKED, ZEROED):
        ours, theirs = trained(world, "none", *rest), trained(world, None, *rest)
        if not torch.equal(ours, theirs):
            found[str(rest)] = float((ours - theirs).abs().max())
    return found


@pytest.mark.parametrize("size", [1, 2, *full(4)])
def test_without_a_codec_weights_are_those_of_plain_ddp_to_the_last_bit(fleet: Fleet, size: int) -> None:
    assert fleet.run(size, beside_ddp) == [{}] * size


@pytest.mark.full
def test_between_three_ranks_only_gradients_kept_in_buckets_beside_a_hook_are_rounded_otherwise(fleet: Fleet) -> None:
    """DDP divides by 3 there what it multiplies by 1/3 elsewhere, and a hook is not told which it would have been."""
    kept = [rest for rest in itertools.product(FORMATS, HOOKED, ZEROED) if len(rest[1]) > 1 and rest[2] != "none"]
    for found in fleet.run(3, beside_ddp):
        assert set(found) <= {str(rest) for rest in kept if rest[1]["gradient_as_bucket_view"]}
        assert all(difference < 1e-7 for difference in found.values())
