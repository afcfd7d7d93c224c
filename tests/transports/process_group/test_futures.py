"""Futures of a zmq group's works: what is put behind one may itself wait for a later call, as with Gloo."""

from __future__ import annotations

import datetime
import functools
import gc
import random
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from commlib.groups.world import World
from commlib.transports.process_group.group import ZmqGroup
from tests.support.rank_pool import Fleet
from tests.support.thread_groups import each, groups, set_deadline
from tests.support.tiers import full, long

DEADLINE_S = 60.0


def nested(group: ZmqGroup, depth: int) -> Tensor:
    """As many all-reduces, each of what the one before came to, and waited for in that one's callback."""

    def more(value: Tensor, left: int) -> Tensor:
        if left:
            found: Tensor = group.allreduce([value]).get_future().then(lambda f: more(f.value()[0], left - 1)).wait()
            return found
        return value

    return more(torch.ones(3), depth)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_callback_may_wait_for_a_later_call_whose_callback_waits_too(depth: int) -> None:
    with groups(2) as ranks:
        set_deadline(ranks, DEADLINE_S)
        for found in each(ranks, lambda group: nested(group, depth)):
            assert found.tolist() == [2.0**depth] * 3


@pytest.mark.parametrize("repetitions", [20, *full(60), *long(200)])
def test_callbacks_that_wait_change_no_order_whatever_the_delays(repetitions: int) -> None:
    """Ten calls under way at once, behind each of which is another, and threads that sleep at random."""

    def train(group: ZmqGroup) -> list[list[float]]:
        dice, found = random.Random(group.rank()), []
        for step in range(repetitions):
            turns = [threading.Event() for _ in range(11)]  # to make a second call: in the same order on both ranks
            turns[0].set()

            def more(i: int, done: Any, turns: list[threading.Event] = turns) -> Tensor:
                time.sleep(dice.random() * 1e-3)
                assert turns[i].wait(DEADLINE_S)
                work = group.allreduce([done.value()[0] + i])
                turns[i + 1].set()
                value: Tensor = work.get_future().wait()[0]
                return value

            begun = [group.allreduce([torch.full((2,), float(step + i))]).get_future() for i in range(10)]
            chained = [f.then(functools.partial(more, i)) for i, f in enumerate(begun)]
            found.append([float(f.wait()[0]) for f in chained])
        return found

    with groups(2) as ranks:
        set_deadline(ranks, DEADLINE_S)
        for found in each(ranks, train):
            assert found == [[2 * (2.0 * (step + i) + i) for i in range(10)] for step in range(repetitions)]


def test_threads_that_serve_end_again_when_they_are_too_many() -> None:
    def serving() -> int:
        return sum(t.name == "commlib-zmq-test" for t in threading.enumerate())

    with groups(2) as ranks:
        set_deadline(ranks, DEADLINE_S)
        each(ranks, lambda group: nested(group, 6))
        for _ in range(200):
            each(ranks, lambda group: group.allreduce([torch.ones(1)]).get_future().then(lambda f: None).wait())
            if serving() <= 6:
                break
        assert serving() <= 6  # three a rank at most: one that serves, and two that wait for more
    for _ in range(100):
        if not serving():
            break
        time.sleep(0.05)
    assert not serving()


def power_sgd(world: World) -> bool:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        ddp(torch.randn(4, 64)).sum().backward()
    grads = [p.grad for p in ddp.parameters() if p.grad is not None]
    others = [torch.empty_like(grads[0]) for _ in range(world.size)]
    dist.all_gather(others, grads[0])
    return torch.equal(others[0], others[1])


def test_pytorchs_power_sgd_hook_trains_over_it(fleet: Fleet) -> None:
    assert all(fleet.run(2, power_sgd, backend="zmq", deadline=100.0))


def joined_without_the_initial_size(world: World) -> float:
    ddp = DistributedDataParallel(nn.Linear(5, 5, bias=False))
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(3 + world.rank):
            ddp.zero_grad()
            ddp(torch.full((1, 5), 50.0)).sum().backward()
    grad = ddp.module.weight.grad
    return float(grad[0, 0])


def test_a_join_divides_by_the_ranks_that_are_left(fleet: Fleet) -> None:
    assert fleet.run(2, joined_without_the_initial_size, backend="zmq", deadline=100.0) == [50.0, 50.0]


def compiled(world: World) -> list[bool]:
    found = []
    for static in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        plain.load_state_dict(module.state_dict())
        x = torch.randn(4, 8)
        both = DistributedDataParallel(plain)
        both(x).square().sum().backward()
        made = torch.compile(DistributedDataParallel(module, static_graph=static), backend="eager")
        made(x).square().sum().backward()
        pairs = zip(module.parameters(), plain.parameters(), strict=True)
        found.append(all(torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None))
    return found


def test_a_compiled_model_has_the_gradients_of_the_eager_one(fleet: Fleet) -> None:
    assert fleet.run(2, compiled, backend="zmq", deadline=100.0) == [[True, True]] * 2


def said_of(call: Any) -> str:
    try:
        call()
    except ValueError as e:
        return str(e)
    return "no error"


@pytest.mark.parametrize("rank", [2, -1, 17])
@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter", "send", "recv"])
def test_a_root_or_peer_that_does_not_exist_is_refused_at_once(name: str, rank: int) -> None:
    x, lists = torch.ones(2), [[torch.ones(2), torch.ones(2)]]

    def call(group: Any) -> None:
        given = {
            "broadcast": lambda: group.broadcast(x, rank),
            "reduce": lambda: group.reduce(x, rank),
            "gather": lambda: group.gather(lists, [x], rank),
            "scatter": lambda: group.scatter([x], lists, rank),
            "send": lambda: group.send([x], rank, 0),
            "recv": lambda: group.recv([x], rank, 0),
        }
        given[name]()

    with groups(2) as ranks:
        for words in each(ranks, lambda group: said_of(lambda: call(group))):
            assert words == f"{name}: there is no rank {rank} in this group, which has ranks 0 to 1"


def test_the_short_forms_of_calls_do_what_the_long_ones_do() -> None:
    late, most = datetime.timedelta(seconds=30), dist.ReduceOp.MAX

    def call(group: Any) -> list[list[float]]:
        mine = torch.tensor([1.0 + group.rank(), 5.0 - group.rank()])

        def places() -> list[Tensor]:
            return [torch.zeros(2), torch.zeros(2)]

        found, all_of, root_of, part = [], places(), places(), torch.zeros(2)
        for begin, result in (
            (lambda x: group.allreduce(x, most, late), None),
            (lambda x: group.allreduce([x], op=most, timeout=late), None),
            (lambda x: group.allreduce(x), None),
            (lambda x: group.broadcast(x, 1, late), None),
            (lambda x: group.broadcast(x, root=1), None),
            (lambda x: group.reduce(x, 0, most), None if group.rank() == 0 else mine),
            (lambda x: group.allgather(all_of, x, timeout=late), all_of),
            (lambda x: group.gather(root_of if group.rank() == 1 else [], x, 1), root_of),
            (lambda x: group.scatter(part, [x, x + 1] if group.rank() == 0 else [], 0), part),
            (lambda x: group.reduce_scatter(part, [x, x + 1], most), part),
            (lambda x: group.barrier(timeout=late), None),
        ):
            x = mine.clone()
            begin(x).wait()
            shown = x if result is None else result
            found.append([v for t in (shown if isinstance(shown, list) else [shown]) for v in t.tolist()])
        return found

    with groups(2) as ranks:
        first, second = each(ranks, call)
    most_of, sums, of_1 = [2.0, 5.0], [3.0, 9.0], [2.0, 4.0]
    both = [1.0, 5.0, 2.0, 4.0]
    assert first == [most_of, most_of, sums, of_1, of_1, most_of, both, [0.0] * 4, [1.0, 5.0], most_of, [1.0, 5.0]]
    assert second == [most_of, most_of, sums, of_1, of_1, of_1, both, both, [2.0, 6.0], [3.0, 6.0], of_1]


def test_what_is_kept_of_a_call_keeps_no_graph_and_no_large_storage_alive() -> None:
    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, alive: Any) -> Tensor:
            ctx.alive = alive
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0], None

    def call(group: ZmqGroup) -> bool:
        alive = torch.nn.Module()
        gone = weakref.ref(alive)
        loss = Noted.apply(torch.ones(1, requires_grad=True), alive)
        group.allreduce([loss]).get_future().wait()
        group.allreduce([torch.ones(1 << 20)[:4]]).wait()
        kept = [result for work in group._kept for result in work.result()]
        del alive, loss
        gc.collect()
        return gone() is None and not any(result.untyped_storage().nbytes() > 4096 for result in kept)

    with groups(2) as ranks:
        assert each(ranks, call) == [True, True]


def profiled(world: World) -> list[tuple[str, int]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(2), 0)
        if world.rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)
    return sorted((e.key, e.count) for e in seen.key_averages() if e.key.startswith("zmq:"))


def test_a_profiler_sees_each_call(fleet: Fleet) -> None:
    sent, received = fleet.run(2, profiled, backend="zmq")
    called = ("zmq:all_reduce", 1), ("zmq:broadcast", 1)
    waited = ("zmq:wait for all_reduce", 1), ("zmq:wait for broadcast", 1)
    assert sent == [*called, ("zmq:send", 1), *waited, ("zmq:wait for send", 1)]
    assert received == [*called, ("zmq:recv", 1), *waited, ("zmq:wait for recv", 1)]


def profiled_often(world: World, times: int) -> int:
    """Profiles that end while what was begun in them is under way, or just through."""
    for n in range(times):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            begun: list[Any] = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(4)]
            for work in begun[: 4 * (n % 2)]:
                work.get_future().wait()
        for work in begun:
            work.wait()
    return times


def test_a_profiler_may_end_while_calls_are_under_way(fleet: Fleet) -> None:
    assert fleet.run(2, profiled_often, 60, backend="zmq") == [60, 60]
