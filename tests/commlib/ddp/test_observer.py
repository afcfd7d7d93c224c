"""Without anything to do, attach() registers no hook: DDP is DDP, its exchanges are counted alike on all ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.ddp import config
from commlib.ddp.observer import handed_over
from commlib.exchange import lanes
from commlib.groups.world import World
from commlib.runtime.streams import Moment
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer, head, owed, same_everywhere

NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1)
TIMES = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0, 1e6))


@given(NAMES, TIMES, st.integers(1, 8))
def test_a_bucket_is_handed_over_when_it_and_those_before_it_are_ready(
    names: list[str], ready: dict[str, float], size: int
) -> None:
    buckets = [tuple(names[i : i + size]) for i in range(0, len(names), size)]
    found = handed_over(buckets, {name: Moment(at) for name, at in ready.items()})
    assert [b for _, b in found] == buckets
    for i, (at, _) in enumerate(found):
        before = [n for b in buckets[: i + 1] for n in b]
        assert (at and at.host_s) == max((ready[n] for n in before if n in ready), default=None)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 5))


def batch(world: World, step: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + world.rank))


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net(), **{"bucket_cap_mb": 0.02, **options})


def hooked(ddp: DistributedDataParallel) -> bool:
    return bool(ddp._comm_hooks)


def step(ddp: nn.Module, x: Tensor) -> None:
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    with torch.no_grad():
        for p in ddp.parameters():
            assert p.grad is not None
            p.sub_(p.grad, alpha=0.1)


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# -- as if nothing were attached ----------------------------------------------------------------


def dense_throughout(world: World) -> dict[str, Any]:
    ours, plain, by_hook = wrapped(), wrapped(), wrapped()
    comm = commlib.attach(ours, "none")
    state = commlib.HookState(by_hook, "none")
    by_hook.register_comm_hook(state, commlib.hook)
    for i in range(6):
        for model in (ours, plain, by_hook):
            step(model, batch(world, i))
    a, b = comm.stats(), state.stats()
    found = {
        "hooks": (hooked(ours), hooked(by_hook)),
        "equal": equal(ours, plain) and equal(by_hook, plain),
        "steps": (a.steps, b.steps),
        "bytes": (a.wire_bytes, b.wire_bytes, a.dense_bytes, b.dense_bytes),
        "layers": sum(layer.wire_bytes for layer in a.layers.values()),
    }
    comm.discard_step()
    found["discarded"] = (comm.stats().steps, comm.stats().skipped)
    comm.close()
    state.close()
    return found


def test_dense_has_no_hook_equals_ddp_bit_for_bit_and_counts_what_a_hook_would(fleet: Fleet) -> None:
    for found in fleet.run(3, dense_throughout):
        assert found["hooks"] == (False, True)
        assert found["equal"]
        assert found["steps"] == (6, 6)
        sent, by_hook, dense, dense_by_hook = found["bytes"]
        assert sent == by_hook == dense == dense_by_hook > 0
        assert abs(found["layers"] - sent) <= 6
        assert found["discarded"] == (5, 1)


def without_waiting(world: World) -> dict[str, Any]:
    """As over NCCL, whose waits hold no thread up."""
    with contextlib.ExitStack() as patches:
        for module in (config, lanes):
            patches.enter_context(mock.patch.object(module, "waits_on_stream", return_value=True))
        ours, plain = wrapped(), wrapped()
        comm = commlib.attach(ours)
    tracks = comm._sequencer.tracks
    with mock.patch.object(tracks, "issue", side_effect=tracks.issue) as issue:
        for i in range(4):
            for model in (ours, plain):
                step(model, batch(world, i))
        before, found = hooked(ours), {"equal": equal(ours, plain), "issued": issue.call_count}
        comm.swap("onebit")
        for i in range(4, 7):
            step(ours, batch(world, i))
    stats = comm.stats()
    comm.close()
    replicas = same_everywhere(world, next(ours.parameters()))
    more = {"hooks": (before, hooked(ours)), "steps": stats.steps, "replicas": replicas, "coded": issue.call_count}
    return found | more


def test_where_no_thread_waits_nobody_does_and_steps_are_counted(fleet: Fleet) -> None:
    for found in fleet.run(2, without_waiting):
        assert found["hooks"] == (False, True)
        assert found["equal"]
        assert found["replicas"]
        assert found["issued"] == 0 < found["coded"]
        assert found["steps"] == 7


# -- what counts as an exchange -----------------------------------------------------------------


def accumulated(ddp: DistributedDataParallel, x: Tensor) -> int:
    with ddp.no_sync():
        ddp(x).sum().backward()
    ddp(x).sum().backward()
    return 1


def evaluated_in_between(ddp: DistributedDataParallel, x: Tensor) -> int:
    y = ddp(x)
    with torch.no_grad():
        ddp(x)
    y.sum().backward()
    return 1


def no_sync_outside_backward(ddp: DistributedDataParallel, x: Tensor) -> int:
    with ddp.no_sync():
        y = ddp(x)
    y.sum().backward()  # DDP decides in the forward pass
    ddp(x).sum().backward()
    return 1


def given_up_before_no_sync(ddp: DistributedDataParallel, x: Tensor) -> int:
    ddp(x)
    with ddp.no_sync():
        ddp(x).sum().backward()  # DDP exchanges here, for the pass before has asked for it
    return 1


def twice_through_one_graph(ddp: DistributedDataParallel, x: Tensor) -> int:
    y = ddp(x).sum()
    y.backward(retain_graph=True)
    y.backward()  # DDP adds up locally here
    return 1


def two_forward_passes(ddp: DistributedDataParallel, x: Tensor) -> int:
    (ddp(x).sum() + ddp(2 * x).sum()).backward()
    return 1


def only_the_inputs(ddp: DistributedDataParallel, x: Tensor) -> int:
    x = x.clone().requires_grad_()
    y = ddp(x).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    (y + slope.square().sum()).backward()
    return 1


def broken_off(ddp: DistributedDataParallel, x: Tensor) -> int:
    def stop(grad: Tensor) -> Tensor:
        raise ArithmeticError("stop")

    y = ddp(x)
    y.register_hook(stop)
    with contextlib.suppress(ArithmeticError):
        y.sum().backward()
    ddp(x).sum().backward()
    return 1


def past_ddp(ddp: DistributedDataParallel, x: Tensor) -> int:
    ddp.module(x).sum().backward()  # not through DDP: no exchange
    return 0


WAYS: list[Callable[[DistributedDataParallel, Tensor], int]] = [
    accumulated,
    evaluated_in_between,
    no_sync_outside_backward,
    given_up_before_no_sync,
    twice_through_one_graph,
    two_forward_passes,
    only_the_inputs,
    broken_off,
    past_ddp,
]


OF_THEIR_OWN = {w.__name__ for w in (twice_through_one_graph, past_ddp)}  # gradients after it


def counted(world: World) -> dict[str, tuple[int, int, bool, bool]]:
    found = {}
    for way in WAYS:
        ours, plain = wrapped(), wrapped()
        comm = commlib.attach(ours, "none")
        expected = 0
        for i in range(3):
            expected += way(ours, batch(world, i))
            way(plain, batch(world, i))
        grads = [[p.grad for p in m.parameters()] for m in (ours, plain)]
        same = all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*grads, strict=True))
        flat = torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None])
        found[way.__name__] = (comm.stats().steps, expected, same, same_everywhere(world, flat))
        comm.close()
    return found


def test_exchanges_are_counted_as_ddp_makes_them(fleet: Fleet) -> None:
    for found in fleet.run(2, counted):
        assert len(found) == len(WAYS)
        for way, (steps, expected, same, exchanged) in found.items():
            assert steps == expected, way
            assert same, way
            assert exchanged == (way not in OF_THEIR_OWN), way


# -- from DDP to the hook -----------------------------------------------------------------------


def taken_over(world: World) -> dict[str, Any]:
    ours, plain = wrapped(), wrapped()
    with head(dense=4) as heads:
        comm = commlib.attach(ours, min_size=0)
    hooks = []
    for i in range(8):
        step(ours, batch(world, i))
        step(plain, batch(world, i))
        hooks.append(hooked(ours))
    seen = heads[0].seen[0] if heads[0].seen else None
    whole = torch.cat([p.detach().reshape(-1) for p in ours.parameters()])
    off = max(float((a - b).abs().max()) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))
    buckets = None if seen is None else [list(b) for b in seen.buckets]
    times = None if seen is None else (list(seen.ready), seen.end, seen.span, dict(seen.seen), dict(seen.rows))
    steps = comm.stats().steps
    comm.close()
    return {
        "hooks": hooks,
        "same": same_everywhere(world, whole),
        "off": off,
        "buckets": buckets,
        "times": times,
        "steps": steps,
    }


def buckets_of_a_hook(world: World) -> list[list[str]]:
    ddp = wrapped()
    comm = commlib.HookState(ddp, "none")
    names = {id(p): n for n, p in ddp.module.named_parameters()}
    seen: list[list[str]] = []

    def note(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        seen.append([names[id(p)] for p in bucket.parameters()])
        future: torch.futures.Future[Tensor] = state.reduce(bucket)
        return future

    note.__annotations__.clear()
    ddp.register_comm_hook(comm, note)
    for i in range(3):
        seen.clear()
        step(ddp, batch(world, i))
    comm.close()
    return seen


def test_the_hook_comes_when_there_is_something_to_do_after_the_same_exchange_on_all_ranks(fleet: Fleet) -> None:
    (buckets, *_) = fleet.run(2, buckets_of_a_hook)
    assert len(buckets) > 1
    for rank, found in enumerate(fleet.run(2, taken_over)):
        assert found["hooks"] == [False] * 3 + [True] * 5
        assert found["same"]
        assert found["off"] < 1e-5
        assert found["steps"] == 8
        if rank == 0:
            assert found["buckets"] == buckets
            ready, end, span, seen, rows = found["times"]
            assert 0 < ready[0] <= ready[-1] <= end <= span
            assert rows == {"0": 8, "2": 8, "4": 8}
            assert all(0 < at < end for at in seen.values())


def saved(world: World) -> Any:
    trainer = Trainer(world, "onebit")
    trainer.train(3)
    trainer.close()
    return trainer.comm.state_dict()


def resumed(world: World, state: Any) -> tuple[bool, bool, int, bool, dict[str, Any]]:
    trainer = Trainer(world, "none")
    before = hooked(trainer.ddp)
    trainer.comm.load_state_dict(state)  # residuals, which the next exchange sends
    after = hooked(trainer.ddp)
    trainer.train(2)
    trainer.close()
    left = trainer.comm.state_dict()
    return before, after, trainer.comm.stats().steps, same_everywhere(world, trainer.weights()), left


def test_residuals_of_a_checkpoint_bring_the_hook(fleet: Fleet) -> None:
    states = fleet.run(2, saved)
    assert any(bool(x.any()) for x in owed(states).values())
    found = fleet.run(2, resumed, commlib.merge_state_dicts(states))
    assert [f[:4] for f in found] == [(False, True, 5, True)] * 2
    assert not any(bool(x.any()) for x in owed([f[4] for f in found]).values())


# -- ranks that drop out ------------------------------------------------------------------------


def joining(world: World, least: int) -> tuple[list[bool], bool]:
    ddp = wrapped()
    with head(dense=3):
        comm = commlib.attach(ddp, min_size=0)
    hooks = [hooked(ddp)]
    with Join([ddp]):
        hooks.append(hooked(ddp))
        for i in range(least + 3 * world.rank):
            step(ddp, batch(world, i))
    comm.close()
    whole = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])
    return hooks, same_everywhere(world, whole)


@pytest.mark.parametrize("least", [0, 2])
def test_a_join_context_brings_the_hook_on_all_ranks_even_on_one_without_inputs(fleet: Fleet, least: int) -> None:
    assert fleet.run(3, joining, least) == [([False, True], True)] * 3


# -- models and options that are not looked at --------------------------------------------------


def not_looked_at(world: World) -> dict[str, bool]:
    found = {}
    group = dist.new_group()
    for name, wrap, options in (
        ("plain", {}, {}),
        ("one bucket", {"bucket_cap_mb": 25}, {}),
        ("views", {"gradient_as_bucket_view": True}, {}),
        ("unused", {"find_unused_parameters": True}, {}),
        ("static", {"static_graph": True}, {}),
        ("limit", {}, {"limit": "1gbit"}),
        ("group", {}, {"process_group": group}),
    ):
        ddp = wrapped(**wrap)
        comm = commlib.attach(ddp, "none", **options)
        for i in range(3):
            step(ddp, batch(world, i))
        found[name] = hooked(ddp)
        assert comm.stats().steps == 3, name
        comm.close()
    ignoring = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["0.weight"])
    ddp = DistributedDataParallel(ignoring)
    comm = commlib.attach(ddp, "none")
    ddp(batch(world, 0)).sum().backward()
    found["ignoring"] = hooked(ddp)
    assert "0.weight" not in comm.stats().layers
    comm.close()
    return found


def test_models_and_options_that_need_a_hook_have_it_from_the_beginning(fleet: Fleet) -> None:
    without = dict.fromkeys(["plain", "one bucket", "views", "ignoring"], False)
    need = dict.fromkeys(["unused", "static", "limit", "group"], True)
    assert fleet.run(2, not_looked_at) == [{**without, **need}] * 2


# -- whose it is --------------------------------------------------------------------------------


def somebody_elses_hook(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
    raise AssertionError("never called")


def in_the_way(world: World) -> tuple[str, str]:
    ddp = wrapped()
    with head(dense=2):
        comm = commlib.attach(ddp, min_size=0)
    said = []
    try:
        commlib.attach(ddp)
    except ValueError as e:
        said.append(str(e))
    step(ddp, batch(world, 0))
    ddp._comm_hooks.append((somebody_elses_hook, None))  # registering it would end the other steps
    try:
        step(ddp, batch(world, 1))
    except ValueError as e:
        said.append(str(e))
    comm.close()
    return said[0], said[1]


def test_a_second_attach_and_another_hook_meanwhile_are_errors_that_say_so(fleet: Fleet) -> None:
    for again, other in fleet.run(2, in_the_way):
        assert "attached already" in again
        assert "already has a communication hook (somebody_elses_hook)" in other


def kept_and_freed(world: World) -> dict[str, bool]:
    ddp = wrapped()
    state = weakref.ref(commlib.attach(ddp, "none"))  # nobody keeps it
    gc.collect()
    step(ddp, batch(world, 0))
    alive = state()
    found = {"kept": alive is not None and alive.stats().steps == 1}
    if alive is not None:
        alive.close()
    del alive
    model = weakref.ref(ddp)
    del ddp
    gc.collect()
    found["freed"] = model() is None and state() is None
    return found


def test_the_model_keeps_the_state_and_nothing_keeps_the_model(fleet: Fleet) -> None:
    assert fleet.run(2, kept_and_freed) == [{"kept": True, "freed": True}] * 2


def copied(world: World) -> bool:
    ddp = wrapped()
    comm = commlib.attach(ddp, "none")
    twin = copy.deepcopy(ddp)
    with Join([twin]):
        step(twin, batch(world, 0))
    step(ddp, batch(world, 0))
    steps = comm.stats().steps
    comm.close()
    return equal(ddp, twin) and not hooked(ddp) and not hooked(twin) and steps == 1


def test_a_copy_of_the_model_joins_as_any_other(fleet: Fleet) -> None:
    assert fleet.run(2, copied) == [True] * 2
