"""Gradient accumulation: what lies in ``grad`` between two exchanges is this rank's own gradient, as with plain DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange.factors.retained import RetainedInput
from commlib.exchange.registry import BY_ROWS
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import batch, model, same_everywhere

BOUND = 2e-6  # of the largest value: float32 sums in another order
Way = Callable[[DistributedDataParallel, torch.optim.Optimizer, World, list[Tensor]], None]


def backward(ddp: nn.Module, world: World, step: int) -> None:
    x, y = (part[:3] for part in batch(world, step))  # few rows, which pay three passes long
    nn.functional.cross_entropy(ddp(x), y).backward()


def gradient(ddp: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1).clone() for p in ddp.parameters() if p.grad is not None])


def looked_at(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, world: World, seen: list[Tensor]) -> None:
    """Two passes, and a look at each."""
    for step in range(2):
        with ddp.no_sync():
            backward(ddp, world, step)
        seen.append(gradient(ddp))
    backward(ddp, world, 2)


def dropped(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, world: World, seen: list[Tensor]) -> None:
    """What was accumulated is not wanted."""
    with ddp.no_sync():
        backward(ddp, world, 0)
    optimizer.zero_grad()
    backward(ddp, world, 1)


def zeroed(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, world: World, seen: list[Tensor]) -> None:
    """The same in place, and between the forward and the backward pass."""
    with ddp.no_sync():
        backward(ddp, world, 0)
    x, y = batch(world, 1)
    loss = nn.functional.cross_entropy(ddp(x), y)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()


def clipped(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, world: World, seen: list[Tensor]) -> None:
    """Each pass by itself."""
    for step in range(3):
        with ddp.no_sync():
            backward(ddp, world, step)
        seen.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.1).reshape(1))
    backward(ddp, world, 3)


def stepped(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, world: World, seen: list[Tensor]) -> None:
    """A step of this rank's own, as in local SGD."""
    with ddp.no_sync():
        backward(ddp, world, 0)
    optimizer.step()
    seen.append(torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]))
    optimizer.zero_grad()
    backward(ddp, world, 1)


def penalised(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, world: World, seen: list[Tensor]) -> None:
    """Some of it came from no rows."""
    with ddp.no_sync():
        x, y = batch(world, 0)
        (nn.functional.cross_entropy(ddp(x), y) + ddp.module[0].weight.square().sum()).backward()
    seen.append(gradient(ddp))
    backward(ddp, world, 1)


def twice(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, world: World, seen: list[Tensor]) -> None:
    """A layer is called twice in a pass."""
    with ddp.no_sync():
        (ddp(batch(world, 0)[0]).square().sum() + ddp(batch(world, 1)[0]).square().sum()).backward()
    seen.append(gradient(ddp))
    backward(ddp, world, 2)


def on_top(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, world: World, seen: list[Tensor]) -> None:
    """On a mean that was not dropped."""
    backward(ddp, world, 0)
    with ddp.no_sync():
        backward(ddp, world, 1)
    seen.append(gradient(ddp))
    backward(ddp, world, 2)


def broken_off(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, world: World, seen: list[Tensor]
) -> None:
    """A pass that fails half-way leaves what it leaves."""

    def fail(grad: Tensor) -> Tensor:
        raise ZeroDivisionError

    with ddp.no_sync():
        x, y = batch(world, 0)
        hidden = ddp.module[1].register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
        with pytest.raises(ZeroDivisionError):
            nn.functional.cross_entropy(ddp(x), y).backward()
        hidden.remove()
        backward(ddp, world, 1)
    seen.append(gradient(ddp))
    backward(ddp, world, 2)


WAYS: dict[str, Way] = {
    f.__name__: f for f in (looked_at, dropped, zeroed, clipped, stepped, penalised, twice, on_top, broken_off)
}


def accumulated(world: World, rule: str | None, way: str, view: bool) -> tuple[list[Tensor], float]:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.005, gradient_as_bucket_view=view)
    comm: Any = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    seen: list[Tensor] = []
    sent = 0.0
    for _ in range(3):  # there is room for the rows from the second on
        optimizer.zero_grad()
        before = 0.0 if comm is None else comm.stats().wire_bytes
        WAYS[way](ddp, optimizer, world, seen)
        seen.append(gradient(ddp))
        sent = 0.0 if comm is None else comm.stats().wire_bytes - before
        optimizer.step()
    if comm is not None:
        comm.close()
    return seen, sent


def compare(world: World, way: str, view: bool) -> dict[str, tuple[float, float, bool]]:
    """Rule → the largest difference from plain DDP, the share of a dense exchange's bytes, whether replicas agree."""
    plain, _ = accumulated(world, None, way, view)
    dense = accumulated(world, "none", way, view)[1]
    found = {}
    for rule in ("none", *BY_ROWS):
        ours, sent = accumulated(world, rule, way, view)
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, plain, strict=True))
        found[rule] = off, sent / dense, same_everywhere(world, ours[-1])
    return found


@pytest.mark.parametrize("view", [False, *full(True)])
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_done_with_it_gradients_are_those_of_plain_ddp(fleet: Fleet, way: str, view: bool) -> None:
    for found in fleet.run(2, compare, way, view):
        assert found["none"][0] == 0
        assert all(off < BOUND * 10 and equal for off, _, equal in found.values()), found
        if way in ("looked_at", "dropped", "zeroed"):
            assert all(found[rule][1] < 0.95 for rule in BY_ROWS), "rows do not travel any more"


# -- what is kept, by itself ----------------------------------------------------------------------


def layer() -> tuple[nn.Linear, RetainedInput]:
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    return linear, RetainedInput(list(linear.parameters()))


def passed(linear: nn.Linear, kept: RetainedInput, *extra: float) -> bool:
    """A pass without an exchange."""
    products = [torch.full_like(p, 1.0) for p in linear.parameters()]
    kept.made(products)
    for i, p in enumerate(linear.parameters()):
        total = products[i] + sum(extra) if extra else products[i]
        assert kept.saw(i, total)
        p.grad = total if p.grad is None else p.grad.add_(total)
    return kept.end()


def test_what_only_rows_have_made_is_untouched_until_somebody_writes_there() -> None:
    linear, kept = layer()
    assert passed(linear, kept)
    assert kept.waiting
    assert kept.untouched()
    assert passed(linear, kept)
    assert linear.weight.grad is not None
    linear.weight.grad.mul_(0.5)
    assert not kept.untouched()


def test_a_gradient_that_was_replaced_by_an_equal_one_is_another() -> None:
    linear, kept = layer()
    passed(linear, kept)
    assert linear.bias.grad is not None
    linear.bias.grad = linear.bias.grad.clone()
    assert not kept.untouched()


def test_gradient_from_elsewhere_and_two_calls_in_a_pass_are_not_of_rows_alone() -> None:
    linear, kept = layer()
    assert not passed(linear, kept, 0.5)
    assert not kept.waiting
    kept.made([torch.ones(2, 3), torch.ones(2)])
    assert not passed(linear, kept)
    kept.made([torch.ones(2, 3), torch.ones(2)])
    assert not kept.end(), "autograd has not come by"


def test_what_is_seen_outside_of_a_pass_is_not_its_business() -> None:
    assert not layer()[1].saw(0, torch.ones(2, 3))
