"""Gradients that land in memory of our own: what one sees of it is what plain DDP does, whatever one does with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange.item import World
from fleet import Fleet

STEPS = 8


def model() -> nn.Module:
    """Several buckets with ``bucket_cap_mb=0.005``, and a weight whose values are not in the order of its indices."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3)
    conv.weight = nn.Parameter(conv.weight.detach().contiguous(memory_format=torch.channels_last))
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 4))


class Pair:
    """The same model twice: with the hook, and as plain DDP is."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.ddps = [DistributedDataParallel(model(), bucket_cap_mb=0.005, **(options or {})) for _ in range(2)]
        self.comm = commlib.attach(self.ddps[0], "none")

    def backward(self, x: Tensor) -> None:
        for ddp in self.ddps:
            nn.functional.cross_entropy(ddp(x), torch.arange(len(x)) % 4).backward()

    def grads(self) -> list[list[Tensor]]:
        return [[p.grad for p in ddp.parameters() if p.grad is not None] for ddp in self.ddps]

    def check(self) -> None:
        ours, theirs = self.grads()
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()

    def zero(self, *, to_none: bool) -> None:
        for ddp in self.ddps:
            for p in ddp.parameters():
                if to_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.zero_()


def batch(world: World, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * world.rank + step)
    return torch.randn(4, 3, 4, 4, generator=generator)


def memories(pair: Pair) -> set[int]:
    return {g.untyped_storage().data_ptr() for g in pair.grads()[0]}


def lands(world: World) -> list[set[int]]:
    pair = Pair()
    seen = []
    for step in range(STEPS):
        pair.zero(to_none=True)
        pair.backward(batch(world, step))
        pair.check()
        seen.append(memories(pair))
    pair.comm.close()
    return seen


def test_from_the_second_step_on_a_bucket_has_the_same_memory_and_gradients_are_views_of_it(fleet: Fleet) -> None:
    for seen in fleet.run(3, lands):
        assert len(seen[0]) == 6  # every parameter has its own, as it comes from the backward pass
        assert all(len(s) < 6 for s in seen[1:])
        assert len(set().union(*seen[1:])) == len(seen[1])


def stays(world: World, options: dict[str, bool]) -> None:
    pair = Pair(options)
    for step in range(4):
        pair.zero(to_none=True)
        pair.backward(batch(world, step))
        pair.check()
    views = options.get("gradient_as_bucket_view", False)
    assert (len(memories(pair)) < 6) == views
    pair.comm.close()


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "find_unused_parameters", "static_graph"])
def test_gradients_stay_where_they_are_where_ddp_does_not_copy_all_of_them(fleet: Fleet, option: str) -> None:
    fleet.run(2, stays, {option: True})


def keeps(world: World, view: Callable[[Tensor], Tensor]) -> None:
    pair = Pair()
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        pair.zero(to_none=True)
        pair.backward(batch(world, step))
        pair.check()
        kept += [(view(g), view(g).clone()) for g in pair.grads()[0][:3]]
    assert all(torch.equal(now, then) for now, then in kept)
    pair.comm.close()


def itself(g: Tensor) -> Tensor:
    return g


def part(g: Tensor) -> Tensor:
    return g[:2]


@pytest.mark.parametrize("view", [itself, part, torch.Tensor.detach], ids=["itself", "a view", "detached"])
def test_whoever_keeps_a_gradient_keeps_its_values(fleet: Fleet, view: Callable[[Tensor], Tensor]) -> None:
    fleet.run(2, keeps, view)


def own_memory(world: World) -> None:
    pair = Pair()
    flats = [torch.zeros(sum(p.numel() for p in ddp.parameters())) for ddp in pair.ddps]
    for ddp, flat in zip(pair.ddps, flats, strict=True):
        start = 0
        for p in ddp.parameters():
            p.grad = flat.as_strided(p.shape, p.stride(), start)
            start += p.numel()
    for step in range(STEPS):
        for flat in flats:
            flat.zero_()
        pair.backward(batch(world, step))
        assert torch.equal(*flats)
        assert flats[0].any()
    pair.comm.close()


def test_gradients_that_somebody_has_given_their_place_stay_there(fleet: Fleet) -> None:
    fleet.run(2, own_memory)


def anything(world: World, seed: int) -> None:
    """A random user, the same on every rank."""
    draw, pair = random.Random(seed), Pair()
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(12):
        pair.zero(to_none=draw.random() < 0.7)
        if draw.random() < 0.2:
            with pair.ddps[0].no_sync(), pair.ddps[1].no_sync():
                pair.backward(batch(world, 1000 + step))
        pair.backward(batch(world, step))
        pair.check()
        for i in draw.sample(range(6), draw.choice([0, 0, 1, 2, 6])):
            g = pair.grads()[0][i]
            kept += [(x, x.clone()) for x in (draw.choice([itself, part, torch.Tensor.detach])(g),)]
        if draw.random() < 0.3:
            kept = kept[len(kept) // 2 :]
        if draw.random() < 0.2:  # as clipping does, in place
            for grads in pair.grads():
                for g in grads:
                    g.mul_(0.5)
            kept = []
        if draw.random() < 0.1:
            for ddp in pair.ddps:
                ddp.zero_grad(set_to_none=True)
        pair.zero(to_none=True) if kept else None  # or what is kept would be accumulated into, with plain DDP too
        assert all(torch.equal(now, then) for now, then in kept)
    pair.comm.close()


@pytest.mark.slow
def test_whatever_one_does_with_gradients_they_are_plain_ddps_to_the_last_bit(fleet: Fleet) -> None:
    for seed in range(25):
        fleet.run(2, anything, seed)
