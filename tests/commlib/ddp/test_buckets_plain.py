"""Buckets that go as they are are sorted once, and again whenever what they were sorted by is no longer so."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.ddp.state import HookState
from commlib.groups.world import World
from tests.support.rank_pool import Fleet

BUCKETS = 2  # with ``bucket_cap_mb=0.005``, from the second step on


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 4))


def hooked(ddp: DistributedDataParallel, rule: Any, **options: Any) -> HookState:
    """Attached in PyTorch's own style: so with a hook, though it may have nothing to do."""
    state = HookState(ddp, rule, min_size=0, **options)
    ddp.register_comm_hook(state, commlib.hook)
    return state


class Watch:
    """How many buckets have been sorted."""

    def __init__(self, comm: HookState) -> None:
        self.sorted, self._sort = 0, comm._buckets.rounds
        vars(comm._buckets)["rounds"] = self

    def __call__(self, *args: Any) -> Any:
        self.sorted += 1
        return self._sort(*args)


def batch(world: World, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * world.rank + step)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def train(ddp: nn.Module, world: World, steps: range) -> None:
    for step in steps:
        ddp.zero_grad()
        x, y = batch(world, step)
        nn.functional.cross_entropy(ddp(x), y).backward()
        with torch.no_grad():
            for p in ddp.parameters():
                assert p.grad is not None
                p.sub_(p.grad, alpha=0.1)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def counted(world: World, rule: Any, options: dict[str, Any]) -> tuple[list[int], bool]:
    ours, plain = (DistributedDataParallel(model(), bucket_cap_mb=0.005) for _ in range(2))
    comm = hooked(ours, rule, **options)
    watch, seen = Watch(comm), []
    for step in range(6):
        train(ours, world, range(step, step + 1))
        seen.append(watch.sorted)
    train(plain, world, range(6))
    comm.close()
    return seen, equal(ours, plain)


def test_a_plain_bucket_is_sorted_when_ddp_first_fills_it_and_then_no_more(fleet: Fleet) -> None:
    for seen, same in fleet.run(2, counted, "none", {}):
        assert same
        assert seen[1] > seen[0]  # DDP fills its buckets anew after its first step
        assert seen[1:] == [seen[1]] * 5


@pytest.mark.parametrize(
    "rule", ["onebit", "fp16", "factors", {"0.*": "onebit", "2.*": "none", "4.*": "fp16"}], ids=str
)
def test_others_are_sorted_in_every_step(fleet: Fleet, rule: Any) -> None:
    for seen, same in fleet.run(2, counted, rule, {}):
        assert not same or rule == "factors"
        assert seen[5] - seen[4] == seen[4] - seen[3] > 0


def test_the_dense_steps_before_a_codec_are_no_plain_ones(fleet: Fleet) -> None:
    for seen, same in fleet.run(2, counted, "onebit", {"dense_steps": 3}):
        assert not same
        assert seen[5] - seen[4] == seen[2] - seen[1] > 0


def drained(world: World) -> tuple[bool, int, int]:
    """What a codec has held back goes out though the buckets are plain, and then they are sorted no more."""
    first = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    comm = commlib.attach(first, "onebit@gather", min_size=0)
    train(first, world, range(4))
    state = comm.state_dict()
    comm.close()
    again = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    again.load_state_dict(first.state_dict())
    comm = hooked(again, "none")
    train(again, world, range(4, 6))  # the buckets are known
    comm.load_state_dict(state)
    watch = Watch(comm)
    train(again, world, range(6, 7))
    once = watch.sorted
    held = comm.state_dict()["ranks"][str(world.rank)]
    train(again, world, range(7, 10))
    comm.close()
    return not held, once, watch.sorted


def test_what_was_held_back_is_drained_from_plain_buckets_too(fleet: Fleet) -> None:
    for nothing, once, later in fleet.run(2, drained):
        assert nothing
        assert once == BUCKETS
        assert later == 2 * once  # one more step to forget it


def waited_for(world: World) -> tuple[list[str], float, float]:
    """Buckets of known plain steps that a lane waited for; seconds and bytes of these steps."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    comm = hooked(ddp, "none")
    train(ddp, world, range(3))
    lanes: list[str] = []
    finish = comm._sequencer._finish_round

    def noted(trip: Any) -> None:
        lanes.append(trip.label)
        finish(trip)

    vars(comm._sequencer)["_finish_round"] = noted
    before = comm.stats()
    train(ddp, world, range(3, 6))
    after = comm.stats()
    comm.close()
    return lanes, after.seconds["wire"] - before.seconds["wire"], after.wire_bytes - before.wire_bytes


def test_a_plain_bucket_ends_without_a_lane_and_is_counted_all_the_same(fleet: Fleet) -> None:
    values = sum(p.numel() for p in model().parameters())
    for lanes, seconds, nbytes in fleet.run(2, waited_for):
        assert lanes == []
        assert seconds > 0
        assert nbytes == 3 * 4 * values  # between two ranks, 2(P − 1)/P is one


def replanned(world: World) -> tuple[list[int], int, float, float]:
    """Under ten plans that say the same: shares of each layer's meter in buckets' ones, and what was counted."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    comm = hooked(ddp, "none")
    watch = Watch(comm)
    for step in range(20):
        if step % 2 == 0:
            comm._plan = dataclasses.replace(comm._plan)
        train(ddp, world, range(step, step + 1))
    stats = comm.stats()
    comm.close()
    shares = [len(meter._shares) for meter in comm._buckets.meters.values()]
    return shares, watch.sorted, stats.wire_bytes, sum(layer.wire_bytes for layer in stats.layers.values())


def test_plans_come_and_go_but_a_bucket_keeps_its_meter_and_every_byte_is_counted(fleet: Fleet) -> None:
    values = sum(p.numel() for p in model().parameters())
    for shares, sorted_, total, of_layers in fleet.run(2, replanned):
        assert max(shares) <= 2  # of the bucket in DDP's first step, and of that in all others
        assert sorted_ >= 10 * BUCKETS
        assert total == 20 * 4 * values
        assert of_layers == pytest.approx(total, abs=len(shares))
