"""Optimizers that people use beside DDP: those that step after the backward pass, and those that would not wait."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _apply_optim_in_backward_hook
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.ddp.compat import advice
from commlib.exchange.registry import BY_ROWS
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import batch, model, same_everywhere

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch scripts something there, and warns of itself
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

RULES = ("none", "onebit", "powersgd:rank=2", *BY_ROWS)
HOOKED = ("onebit", "factors")


def backward(ddp: nn.Module, world: World, step: int) -> Tensor:
    x, y = batch(world, step)
    loss = nn.functional.cross_entropy(ddp(x), y)
    loss.backward()
    return loss.detach()


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


def error(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


# -- after the backward pass ----------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "ZeroRedundancyOptimizer": lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def optimized(world: World, rule: str | None, name: str) -> Tensor:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    comm: Any = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    optimizer = OPTIMIZERS[name](ddp.parameters())
    for step in range(4):
        optimizer.zero_grad()
        backward(ddp, world, step)
        optimizer.step()
    if comm is not None:
        comm.close()
    return weights(ddp)


def all_optimized(world: World, name: str) -> dict[str, bool]:
    found = {rule: same_everywhere(world, optimized(world, rule, name)) for rule in RULES}
    found["none is plain DDP"] = torch.equal(optimized(world, None, name), optimized(world, "none", name))
    if name == "ZeroRedundancyOptimizer":
        found["and Adam"] = torch.equal(optimized(world, "onebit", name), optimized(world, "onebit", "Adam"))
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_steps_after_the_backward_pass_has_equal_replicas(fleet: Fleet, name: str) -> None:
    for found in fleet.run(2, all_optimized, name):
        assert all(found.values()), found


def several_closures(world: World) -> dict[str, tuple[bool, int, int]]:
    found = {}
    for rule in RULES:
        ddp = DistributedDataParallel(model(), bucket_cap_mb=0.005)
        comm = commlib.attach(ddp, rule, min_size=0)
        optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
        calls = 0

        def closure(optimizer: Any = optimizer, ddp: nn.Module = ddp) -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = backward(ddp, world, 0)
            dist.all_reduce(loss)  # or ranks would go on differently
            return loss / world.size

        for _ in range(2):
            optimizer.step(closure)
        found[rule] = same_everywhere(world, weights(ddp)), calls, comm.stats().steps
        comm.close()
    return found


def test_lbfgs_has_a_step_a_closure_and_equal_replicas(fleet: Fleet) -> None:
    for found in fleet.run(2, several_closures):
        for same, calls, steps in found.values():
            assert same
            assert calls == steps > 2


# -- within it, by a hook of DDP ------------------------------------------------------------------


def in_backward(world: World) -> dict[str, str]:
    found = {}
    for when in ("before DDP", "after DDP"):
        for make in (commlib.attach, commlib.HookState):
            net = model()
            ddp = None if when == "before DDP" else DistributedDataParallel(net)
            _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})
            ddp = ddp or DistributedDataParallel(net)
            found[f"{when}, {make.__name__}"] = error(functools.partial(make, ddp, "onebit"))
    return found


def test_an_optimizer_in_the_backward_pass_is_refused_by_name(fleet: Fleet) -> None:
    for found in fleet.run(2, in_backward):
        assert len(found) == 4
        for said in found.values():
            assert "ValueError: " in said
            assert "_apply_optimizer_in_backward" in said
            assert "step after the backward pass" in said


def in_backward_later(world: World, rule: str | None, when: str) -> tuple[str, Tensor]:
    """Put on behind our back."""
    net = model()
    ddp = DistributedDataParallel(net)
    comm = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    if when == "after a step":
        backward(ddp, world, 0)
        net.zero_grad()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})
    said = error(lambda: backward(ddp, world, 1))
    if comm is not None:
        comm.close()
    return said, weights(net)


@pytest.mark.parametrize("rule", HOOKED)
def test_put_on_after_attach_it_is_refused_by_ddp(fleet: Fleet, rule: str) -> None:
    for said, _ in fleet.run(2, in_backward_later, rule, "after attach"):
        assert "can only be called once" in said


@pytest.mark.parametrize("rule", [None, "none", *HOOKED])
def test_put_on_after_a_step_it_takes_each_ranks_own_gradient_as_with_plain_ddp(fleet: Fleet, rule: str | None) -> None:
    (_, first), (_, second) = fleet.run(2, in_backward_later, rule, "after a step")
    (_, plain), _ = fleet.run(2, in_backward_later, None, "after a step")
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, plain, rtol=0, atol=1e-6)


def fused(world: World, rule: str, when: str) -> str:
    ddp = DistributedDataParallel(model())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of PyTorch's functional optimizers
        if when == "before":
            ddp._register_fused_optim(torch.optim.SGD, 0.05)
            return error(lambda: commlib.attach(ddp, rule))
        comm = commlib.attach(ddp, rule, min_size=0)
        with contextlib.closing(comm):
            said = error(lambda: ddp._register_fused_optim(torch.optim.SGD, 0.05))
            return said if said != "no error" else error(lambda: backward(ddp, world, 0))


@pytest.mark.parametrize("rule", ["none", "auto", *HOOKED])
def test_a_fused_optimizer_is_refused_by_name_before_attach_and_after_it(fleet: Fleet, rule: str) -> None:
    for said in fleet.run(2, fused, rule, "before"):
        assert "already has a communication hook" in said
        assert "_register_fused_optim; step after the backward pass" in said
    for said in fleet.run(2, fused, rule, "after"):
        assert "_register_fused_optim" in said or "can only be called once" in said


def zero_overlap(world: World) -> str:
    ddp = DistributedDataParallel(model())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01)
    return error(lambda: ddp_zero_hook.hook_with_zero_step(allreduce_hook, ddp, zero))


def test_zero_that_overlaps_with_ddp_is_refused_by_pytorch_over_gloo_and_by_name_elsewhere(fleet: Fleet) -> None:
    for said in fleet.run(2, zero_overlap):
        assert "Gloo backend using Overlapping DDP with ZeRO may meet hangs" in said
    makers = (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved)
    for maker in makers:  # it names its hook by what is looked for
        inner = {c.co_name for c in maker.__code__.co_consts if hasattr(c, "co_name")}
        assert any("overlap_with_ddp=True" in advice(name) for name in inner), inner


def test_the_hook_of_optimizers_in_the_backward_pass_is_known_by_its_name() -> None:
    names = {c.co_name for c in _apply_optim_in_backward_hook.__code__.co_consts if hasattr(c, "co_name")}
    assert any("_apply_optimizer_in_backward" in advice(name) for name in names)
    assert advice("a_hook_of_somebody") == "wrap the model in a new DistributedDataParallel"


# -- within it, by a hook on parameters -----------------------------------------------------------


def post_accumulate(world: World, rule: str | None, steps: bool) -> tuple[list[str], Tensor, Tensor]:
    """Warnings of attach; what the hooks saw in the second step; the weights."""
    net = model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.005)
    seen: dict[int, Tensor] = {}
    optimizers = {id(p): torch.optim.SGD([p], lr=0.05) for p in net.parameters()}

    def at_once(p: Tensor) -> None:
        assert p.grad is not None
        seen[id(p)] = p.grad.detach().reshape(-1).clone()
        if steps:
            optimizers[id(p)].step()
            optimizers[id(p)].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(at_once)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        comm = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    for step in range(2):
        net.zero_grad()
        backward(ddp, world, step)
    if comm is not None:
        comm.close()
    words = [str(w.message) for w in said if "post-accumulate" in str(w.message)]
    return words, torch.cat([seen[id(p)] for p in net.parameters()]), weights(net)


@pytest.mark.parametrize("rule", ["none", "onebit", *BY_ROWS])
def test_a_post_accumulate_hook_is_warned_of_by_name_and_sees_this_ranks_gradient(fleet: Fleet, rule: str) -> None:
    plain = fleet.run(2, post_accumulate, None, False)
    for (words, seen, _), (_, expected, _) in zip(fleet.run(2, post_accumulate, rule, False), plain, strict=True):
        (said,) = words
        assert "0.weight and 5 more parameters have a post-accumulate hook" in said
        assert "this rank's gradient" in said
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", [None, "none", "onebit", *BY_ROWS])
def test_an_optimizer_in_it_makes_replicas_different_with_plain_ddp_too(fleet: Fleet, rule: str | None) -> None:
    (_, _, first), (_, _, second) = fleet.run(2, post_accumulate, rule, True)
    (_, _, plain), _ = fleet.run(2, post_accumulate, None, True)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, plain, rtol=0, atol=1e-6)
