"""The hook under every way PyTorch lets one use DDP: real ranks over Gloo, and plain DDP as the measure."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange.registry import BY_ROWS
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full

STEPS = 12
WIDTH = 24

# -- models -------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


class TwoBranches(nn.Module):
    """One of two branches is used, as ``branch`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.branches[branch](torch.tanh(self.first(x)))))
        return out


class Tied(nn.Module):
    """Projects back with the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 32)
        self.inner = nn.Linear(32, 32)
        self.outer = nn.Linear(32, 4)
        self.outer.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(self.embedding(x[:, :4].argmax(1)))))
        return out


class OddShapes(nn.Module):
    """A scalar parameter and one of no elements beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.gain + self.nothing.sum()
        return out


class MixedDtypes(nn.Module):
    """float32, bfloat16, float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.middle = nn.Linear(32, 32).bfloat16()
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)).bfloat16())).float())
        return out


class Scoped(nn.Module):
    """A child called ``module``, and a sibling whose names are those of the child's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(WIDTH, 32)
        self.weight = nn.Parameter(torch.randn(4, 32) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.tanh(self.module(x)), self.weight)


def frozen_part() -> nn.Module:
    model = mlp()
    model[2].requires_grad_(False)  # type: ignore[index]
    return model


def conv_norm() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def images(world: World) -> tuple[Tensor, Tensor]:
    """Constant images and a little noise; to be told: the constants."""
    level = rows(world, 3)[0]
    noise = rows(world, 3 * 8 * 8)[0].view(-1, 3, 8, 8)
    x = level[:, :, None, None] + 0.1 * noise
    return x.contiguous(memory_format=torch.channels_last), torch.cat([level, level[:, :1]], 1)


# -- training -----------------------------------------------------------------------------------


def rows(world: World, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """This rank's share of a regression that a linear model can learn."""
    teacher = torch.randn(width, 4, generator=torch.Generator().manual_seed(7)) / math.sqrt(width)
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(100 + world.rank))
    return x, x @ teacher


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def call(ddp: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    out: Tensor = ddp(x)
    return out


def same_branch(ddp: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    out: Tensor = ddp(x, step % 2)
    return out


def other_branch_per_rank(ddp: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    out: Tensor = ddp(x, (step + rank) % 2)
    return out


def clip(ddp: nn.Module) -> None:
    nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of using DDP."""

    model: Callable[[], nn.Module] = mlp
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    batch: Callable[[World], tuple[Tensor, Tensor]] = rows
    call: Callable[[nn.Module, Tensor, int, int], Tensor] = call
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    after_backward: Callable[[nn.Module], None] = lambda ddp: None
    size: int = 2
    codecs: tuple[str, ...] = ("onebit",)


SMALL = {"bucket_cap_mb": 0.01}
CASES = {
    "plain": Case(size=3, codecs=("onebit", "powersgd:rank=2", "topk:ratio=0.1")),
    "gradient_as_bucket_view": Case(ddp={"gradient_as_bucket_view": True}, size=3),
    "static_graph": Case(ddp={"static_graph": True}),
    "a branch unused in alternating steps": Case(TwoBranches, {"find_unused_parameters": True}, call=same_branch),
    "another branch unused on each rank": Case(
        TwoBranches, {"find_unused_parameters": True}, call=other_branch_per_rank, size=3
    ),
    "unused parameters in bucket views": Case(
        TwoBranches, {"find_unused_parameters": True, "gradient_as_bucket_view": True}, call=same_branch
    ),
    "bfloat16": Case(dtype=torch.bfloat16),
    "float64": Case(dtype=torch.float64, size=3),
    "mixed dtypes": Case(MixedDtypes),
    "frozen parameters": Case(frozen_part),
    "tied parameters": Case(Tied),
    "a scalar and an empty parameter": Case(OddShapes, size=3, codecs=("onebit", "onebit@scatter_gather", "powersgd")),
    "a child called module": Case(Scoped),
    "convolutions in channels_last with BatchNorm": Case(
        conv_norm, batch=images, codecs=("onebit", "powersgd:rank=2"), optimizer=lambda p: torch.optim.Adam(p, lr=0.02)
    ),
    "SGD with momentum": Case(optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "Adam": Case(optimizer=lambda p: torch.optim.Adam(p, lr=0.01)),
    "clip_grad_norm_": Case(after_backward=clip),
    "small buckets on four ranks": Case(ddp=SMALL, size=4, codecs=("onebit@scatter_gather", "powersgd:rank=2")),
}


@dataclasses.dataclass
class Outcome:
    """What one rank has at the end."""

    values: list[Tensor]
    moved: bool
    losses: list[float]
    steps: int


def train(world: World, case: Case, codec: str | None) -> Outcome:
    torch.manual_seed(0)
    model = case.model()
    if case.dtype != torch.float32:
        model = model.to(case.dtype)
    ddp = DistributedDataParallel(model, **case.ddp)
    comm = None if codec is None else commlib.attach(ddp, codec, min_size=0)
    start = snapshot(ddp)
    optimizer = case.optimizer([p for p in ddp.parameters() if p.requires_grad])
    x, y = case.batch(world)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        out = case.call(ddp, x.to(case.dtype), step, world.rank)
        loss = nn.functional.mse_loss(out.float(), y)
        loss.backward()
        case.after_backward(ddp)
        optimizer.step()
        losses.append(loss.item())
    values = snapshot(ddp)
    steps = -1 if comm is None else comm.stats().steps
    if comm is not None:
        comm.close()
    return Outcome(values, any(not torch.equal(a, b) for a, b in zip(start, values, strict=True)), losses, steps)


def snapshot(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def run_case(world: World, name: str) -> dict[str, Outcome]:
    case = CASES[name]
    runs = {"plain DDP": train(world, case, None), "none": train(world, case, "none")}
    return {**runs, **{codec: train(world, case, codec) for codec in (*case.codecs, *BY_ROWS)}}


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Bitwise, NaN included."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.numpy(force=True).tobytes() == y.numpy(force=True).tobytes()
        for x, y in zip(map(_bits, a), map(_bits, b), strict=True)
    )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16) if x.dtype == torch.bfloat16 else x.contiguous()


def all_equal(values: Sequence[Sequence[Tensor]]) -> bool:
    return all(equal(values[0], v) for v in values)


SOME = ["plain", "another branch unused on each rank", "mixed dtypes", "tied parameters", "clip_grad_norm_"]


@pytest.mark.parametrize("name", [*SOME, *full(*(name for name in CASES if name not in SOME))])
def test_it_trains_as_ddp_does(fleet: Fleet, name: str):
    """Replicas equal bit for bit with every codec, "none" equals plain DDP, and the loss goes down."""
    case = CASES[name]
    ranks = fleet.run(case.size, run_case, name)
    for codec in ("none", *case.codecs, *BY_ROWS):
        assert all_equal([r[codec].values for r in ranks]), f"{codec}: replicas differ"
        assert ranks[0][codec].steps == STEPS, codec
        assert ranks[0][codec].moved, codec
        assert all(v.isfinite().all() for v in ranks[0][codec].values), codec
        losses = [sum(step) / case.size for step in zip(*(r[codec].losses for r in ranks), strict=True)]
        assert losses[-1] < 0.9 * losses[0], f"{codec}: {losses}"
    assert equal(ranks[0]["none"].values, ranks[0]["plain DDP"].values), '"none" is not plain DDP'
    for exact in BY_ROWS:
        assert ranks[0][exact].losses == pytest.approx(ranks[0]["plain DDP"].losses, rel=0.02), f"{exact} is exact"


# -- accumulation, Join -------------------------------------------------------------------------


def accumulate(world: World, codec: str | None) -> tuple[list[Tensor], list[int]]:
    """Two micro-batches a step, the first under no_sync; gradients of all steps, and steps counted in between."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp())
    comm = None if codec is None else commlib.attach(ddp, codec, min_size=0)
    optimizer = sgd(ddp.parameters())
    x, y = rows(world)
    gradients: list[Tensor] = []
    counts = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            nn.functional.mse_loss(ddp(x[:8]), y[:8]).backward()
        if comm is not None:
            counts.append(comm.stats().steps)
        nn.functional.mse_loss(ddp(x[8:]), y[8:]).backward()
        if comm is not None:
            counts.append(comm.stats().steps)
        gradients += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        optimizer.step()
    return [*gradients, *snapshot(ddp)], counts


def accumulate_thrice(world: World) -> list[tuple[list[Tensor], list[int]]]:
    return [accumulate(world, codec) for codec in (None, "none", "onebit")]


def test_gradients_accumulated_under_no_sync_are_exchanged_once_and_count_one_step(fleet: Fleet):
    ranks = fleet.run(2, accumulate_thrice)
    for i in range(3):
        assert all_equal([r[i][0] for r in ranks])
    plain, none, onebit = ranks[0]
    assert equal(plain[0], none[0])
    assert not equal(plain[0], onebit[0])
    expected = [count for step in range(STEPS) for count in (step, step + 1)]
    assert none[1] == onebit[1] == expected


def join_uneven(world: World) -> list[list[Tensor]]:
    """Rank r has 10 + 3r batches."""
    results = []
    for codec in (None, "none", "onebit", "powersgd:rank=2", *BY_ROWS):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(mlp())
        if codec is not None:
            commlib.attach(ddp, codec, min_size=0)
        optimizer = sgd(ddp.parameters())
        x, y = rows(world)
        with Join([ddp]):
            for _ in range(10 + 3 * world.rank):
                optimizer.zero_grad()
                nn.functional.mse_loss(ddp(x), y).backward()
                optimizer.step()
        results.append(snapshot(ddp))
    return results


def test_join_with_uneven_numbers_of_batches_ends_with_equal_replicas(fleet: Fleet):
    ranks = fleet.run(3, join_uneven)
    for i in range(6):
        assert all_equal([r[i] for r in ranks])
        assert all(v.isfinite().all() for v in ranks[0][i])


def hook_of_pytorch(state, bucket):
    """All-reduce, as plain DDP does; Join treats every registered hook alike."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    work: Any = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


def join_beside_a_plain_hook(world: World) -> list[list[Tensor]]:
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(mlp())
        if ours:
            commlib.attach(ddp)
        else:
            ddp.register_comm_hook(None, hook_of_pytorch)
        optimizer = sgd(ddp.parameters())
        x, y = rows(world)
        with Join([ddp]):
            for _ in range(4 + 3 * world.rank):
                optimizer.zero_grad()
                nn.functional.mse_loss(ddp(x), y).backward()
                optimizer.step()
        results.append(snapshot(ddp))
    return results


def test_join_treats_none_as_an_all_reduce_hook_bit_for_bit(fleet: Fleet):
    for plain, ours in fleet.run(2, join_beside_a_plain_hook):
        assert equal(plain, ours)


# -- several models, groups, styles -------------------------------------------------------------


def two_models(world: World, codec: str | None) -> list[Tensor]:
    """Alternately, then in one combined loss, one model feeding the other."""
    torch.manual_seed(0)
    one, two = (
        DistributedDataParallel(mlp()),
        DistributedDataParallel(nn.Sequential(nn.Linear(4, 40), nn.Linear(40, 4))),
    )
    if codec is not None:
        commlib.attach(one, codec, min_size=0)
        commlib.attach(two, "none" if codec == "none" else "powersgd:rank=1", min_size=0)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.05)
    x, y = rows(world)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step < STEPS // 2:
            nn.functional.mse_loss(one(x), y).backward()
            nn.functional.mse_loss(two(y), y).backward()
        else:
            hidden = one(x)
            (nn.functional.mse_loss(two(hidden), y) + nn.functional.mse_loss(hidden, y)).backward()
        optimizer.step()
    return [*snapshot(one), *snapshot(two)]


def two_models_thrice(world: World) -> list[list[Tensor]]:
    return [two_models(world, codec) for codec in (None, "none", "onebit@scatter_gather")]


def test_two_models_train_alternately_and_in_one_loss(fleet: Fleet):
    ranks = fleet.run(3, two_models_thrice)
    for i in range(3):
        assert all_equal([r[i] for r in ranks])
    plain, none, onebit = ranks[0]
    assert equal(plain, none)
    assert not equal(plain, onebit)
    assert all(v.isfinite().all() for v in onebit)


def subgroups(world: World) -> list[list[Tensor]]:
    """Ranks 0 and 1 in one group, rank 2 alone in another, at the same time."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    group = pair if world.rank < 2 else alone
    results = []
    for codec in (None, "none", "onebit", "powersgd:rank=2", "onebit@scatter_gather"):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(mlp(), process_group=group)
        if codec is not None:
            comm = commlib.attach(ddp, codec, min_size=0, process_group=group)
            assert comm.world.size == (2 if world.rank < 2 else 1)
        optimizer = sgd(ddp.parameters())
        x, y = rows(world)
        for _ in range(STEPS if world.rank < 2 else 2 * STEPS):  # each group at its own pace
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        results.append(snapshot(ddp))
    return results


def test_two_groups_train_at_the_same_time_each_at_its_own_pace(fleet: Fleet):
    first, second, third = fleet.run(3, subgroups)
    for i in range(5):
        assert equal(first[i], second[i])
        assert all(v.isfinite().all() for v in third[i])
        assert not equal(first[i], third[i])
    assert equal(first[0], first[1])
    assert equal(third[0], third[1])


def only_a_subgroup_attaches(world: World) -> list[Tensor]:
    pair = dist.new_group([0, 1])
    if world.rank == 2:
        return []
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp(), process_group=pair)
    commlib.attach(ddp, "onebit@scatter_gather", min_size=0, timeout=120)  # the group is DDP's own
    x, y = rows(world)
    for _ in range(10):
        nn.functional.mse_loss(ddp(x), y).backward()
    return [p.grad for p in ddp.parameters() if p.grad is not None]


def test_a_rank_outside_the_group_need_not_do_anything(fleet: Fleet):
    first, second, outside = fleet.run(3, only_a_subgroup_attaches)
    assert len(first) == 6
    assert equal(first, second)
    assert outside == []


def attach_once(world: World) -> int:
    ddp = DistributedDataParallel(mlp())
    comm = commlib.attach(ddp, "onebit", min_size=0, timeout=120)
    x, y = rows(world)
    nn.functional.mse_loss(ddp(x), y).backward()
    return comm.stats().steps


def test_ranks_whose_processes_attached_to_different_numbers_of_earlier_groups_agree(fleet: Fleet):
    """A process group is torn down and made again, as elastic training does; a newcomer has attached nothing yet."""
    assert fleet.run(2, attach_once) == [1, 1]
    assert fleet.run(3, attach_once) == [1, 1, 1]


def pytorch_style(world: World) -> list[list[Tensor]]:
    results = []
    for style in ("attach", "register", "inner module"):
        torch.manual_seed(0)
        model = mlp()
        ddp = DistributedDataParallel(model)
        if style == "attach":
            commlib.attach(ddp, "onebit", min_size=0)
        else:
            state = commlib.HookState(ddp if style == "register" else model, "onebit", min_size=0)
            ddp.register_comm_hook(state, commlib.hook)
        optimizer = sgd(ddp.parameters())
        x, y = rows(world)
        for _ in range(10):
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        results.append(snapshot(ddp))
    return results


def test_register_comm_hook_with_a_hook_state_is_attach(fleet: Fleet):
    for attached, registered, inner in fleet.run(2, pytorch_style):
        assert equal(attached, registered)
        assert equal(attached, inner)


# -- options ------------------------------------------------------------------------------------


def rules(world: World) -> tuple[dict[str, tuple[str, str]], dict[str, str], str, list[Tensor]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp())
    table = {"0.weight": "dense", "*.weight": "topk:ratio=0.05", "4.*": "onebit", "2.bias": "onebit@gather"}
    comm = commlib.attach(ddp, table, min_size=0)
    x, y = rows(world)
    for _ in range(10):
        nn.functional.mse_loss(ddp(x), y).backward()
    stats = comm.stats()
    assert stats.steps == 10
    assert abs(stats.wire_bytes - sum(layer.wire_bytes for layer in stats.layers.values())) < 8 * len(stats.layers) * 10
    plan = {p.spec.name: (str(p.route), p.reason) for p in comm.plan}
    routes = {name: layer.route for name, layer in stats.layers.items()}
    return plan, routes, str(comm.plan), [p.grad for p in ddp.parameters() if p.grad is not None]


def test_the_first_rule_that_matches_decides_and_no_match_is_dense(fleet: Fleet):
    ranks = fleet.run(2, rules)
    plan, routes, table, _ = ranks[0]
    assert plan == {
        "0.weight": ("none@dense", "rule '0.weight'"),
        "0.bias": ("none@dense", "no rule matches"),
        "2.weight": ("topk:ratio=0.05@gather", "rule '*.weight'"),
        "2.bias": ("onebit@gather", "rule '2.bias'"),
        "4.weight": ("topk:ratio=0.05@gather", "rule '*.weight'"),
        "4.bias": plan["4.bias"],  # four values: whether a payload is smaller is the codec's business
    }
    assert routes == {name: route for name, (route, _) in plan.items()}
    assert "no rule matches" in table
    assert "topk:ratio=0.05@gather" in table
    assert all_equal([r[3] for r in ranks])


def plans(world: World) -> dict[str, dict[str, tuple[str, str]]]:
    found = {}
    for title, codec, options in (
        ("min_size", "onebit", {"min_size": 1000}),
        ("default", "onebit", {}),
        ("powersgd", "powersgd:rank=2", {"min_size": 0}),
    ):
        comm = commlib.attach(DistributedDataParallel(mlp()), codec, **options)
        found[title] = {p.spec.name: (str(p.route), p.reason) for p in comm.plan}
    return found


def test_the_plan_says_which_layers_stay_dense_and_why(fleet: Fleet):
    found = fleet.run(2, plans)[0]
    assert found["min_size"]["0.weight"] == ("none@dense", "768 values < min_size=1000")
    assert found["min_size"]["2.weight"] == ("onebit@gather", "rule '*'")
    assert found["default"]["0.bias"] == ("none@dense", "32 values < min_size=1024")
    assert found["default"]["2.weight"] == ("onebit@gather", "rule '*'")
    assert found["powersgd"]["0.weight"] == ("powersgd:rank=2@low_rank", "rule '*'")
    assert found["powersgd"]["0.bias"] == ("none@dense", "a tensor of shape (32,) is no matrix")


def warm_up(world: World, codec: str | None, dense_steps: int) -> tuple[list[list[Tensor]], list[int], list[int]]:
    """Parameters, bytes sent and dense bytes after every step."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp())
    comm = None if codec is None else commlib.attach(ddp, codec, min_size=0, dense_steps=dense_steps)
    optimizer = sgd(ddp.parameters())
    x, y = rows(world)
    values, wire, dense = [], [], []
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        values.append(snapshot(ddp))
        if comm is not None:
            stats = comm.stats()
            wire.append(stats.wire_bytes)
            dense.append(stats.dense_bytes)
    return values, wire, dense


def warm_ups(world: World) -> list[tuple[list[list[Tensor]], list[int], list[int]]]:
    return [warm_up(world, None, 0), warm_up(world, "onebit", 4), warm_up(world, "powersgd:rank=2", 4)]


def test_dense_steps_are_plain_ddp_bit_for_bit_and_the_bytes_show_the_switch(fleet: Fleet):
    ranks = fleet.run(3, warm_ups)
    plain = ranks[0][0]
    for i in (1, 2):
        values, wire, dense = ranks[0][i]
        assert all_equal([r[i][0][-1] for r in ranks])
        for step in range(4):
            assert equal(values[step], plain[0][step]), f"step {step}"
        assert not equal(values[4], plain[0][4])
        assert wire[:4] == dense[:4]
        per_step = [b - a for a, b in itertools.pairwise(wire)]
        assert all(n < 0.5 * dense[0] for n in per_step[3:])


# -- discarding ---------------------------------------------------------------------------------

PENDING = {"0.*": "onebit@scatter_gather", "2.weight": "powersgd:rank=2", "2.bias": "none", "*": "topk:ratio=0.1"}


def tensors_of(state: Any) -> list[Tensor]:
    """Every tensor in a state dict, in the order of the keys."""
    if isinstance(state, Tensor):
        return [state]
    return [t for key in sorted(state) for t in tensors_of(state[key])] if isinstance(state, dict) else []


def discards(world: World) -> dict[str, Any]:
    torch.manual_seed(0)
    start = mlp()
    runs: dict[str, Any] = {}
    for discard in (False, True):
        ddp = DistributedDataParallel(copy.deepcopy(start))
        comm = commlib.attach(ddp, PENDING, min_size=0)
        optimizer = sgd(ddp.parameters())
        x, y = rows(world)
        for step in range(10):
            if discard and step == 4:
                optimizer.zero_grad()
                before = comm.state_dict()
                nn.functional.mse_loss(ddp(3 * x), y).backward()
                comm.discard_step()
                after = comm.state_dict()
                runs["before"], runs["after"] = tensors_of(before), tensors_of(after)
                runs["steps"] = before["step"], after["step"]
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
        stats = comm.stats()
        runs["with" if discard else "without"] = [*snapshot(ddp), *tensors_of(comm.state_dict())]
        runs["skipped"] = stats.steps, stats.skipped
    return runs


def test_a_discarded_step_leaves_residuals_and_later_steps_as_if_it_had_never_been(fleet: Fleet):
    ranks = fleet.run(3, discards)
    for r in ranks:
        assert len(r["before"]) >= 4
        assert any(t.count_nonzero() for t in r["before"])
        assert equal(r["before"], r["after"])
        assert r["steps"] == (4, 4)
        assert equal(r["with"], r["without"])
        assert r["skipped"] == (10, 1)


def discard_after_a_look(world: World) -> dict[str, Any]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(mlp())
    comm = commlib.attach(ddp, "onebit", min_size=0)
    x, y = rows(world)
    for _ in range(3):
        nn.functional.mse_loss(ddp(x), y).backward()
    before = comm.state_dict()
    nn.functional.mse_loss(ddp(x), y).backward()
    bytes_so_far = comm.stats().wire_bytes
    comm.discard_step()
    after = comm.state_dict()
    nn.functional.mse_loss(ddp(x), y).backward()
    stats = comm.stats()
    return {
        "before": tensors_of(before),
        "after": tensors_of(after),
        "looked": bytes_so_far > 0,
        "counts": (stats.steps, stats.skipped),
    }


def test_a_look_at_the_stats_before_discard_step_changes_nothing(fleet: Fleet):
    for r in fleet.run(2, discard_after_a_look):
        assert r["looked"]
        assert equal(r["before"], r["after"]), "the step was committed by stats() and discard_step came too late"
        assert r["counts"] == (4, 1), "discard_step has thrown away the step after the one it was called for"


# -- on a GPU -----------------------------------------------------------------------------------

GPU_CODECS = (None, "none", "onebit", "topk:ratio=0.1", "powersgd:rank=2")


def on_gpu(world: World, backend: str) -> dict[str, tuple[list[Tensor], list[float], int]]:
    """Ranks share device 0. Every rank takes part in making every group; NCCL allows one rank a device."""
    torch.cuda.set_device(0)
    group = dist.new_group(list(range(world.size)), backend=backend)
    results = {}
    for codec in GPU_CODECS:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(mlp().cuda(), device_ids=[0], process_group=group)
        comm = None if codec is None else commlib.attach(ddp, codec, min_size=0)
        optimizer = sgd(ddp.parameters())
        x, y = (t.cuda() for t in rows(world))
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        values = [v.cpu() for v in snapshot(ddp)]
        steps = -1
        if comm is not None:
            stats = comm.stats()
            steps = stats.steps
            assert all(math.isfinite(s) and s >= 0 for s in stats.seconds.values())
            comm.close()
        results[str(codec)] = values, [float(v) for v in losses], steps
    torch.cuda.synchronize()
    if backend == "nccl":
        dist.destroy_process_group(group)
    return results


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "size"), [("nccl", 1), ("gloo", 2), ("zmq", 2)])
def test_on_a_gpu_it_trains_as_ddp_does(fleet: Fleet, backend: str, size: int):
    if backend == "nccl" and not dist.is_nccl_available():
        pytest.skip("this PyTorch is built without NCCL")
    ranks = fleet.run(size, on_gpu, backend)
    for codec in GPU_CODECS[1:]:
        assert all_equal([r[str(codec)][0] for r in ranks]), f"{codec}: replicas differ"
        values, losses, steps = ranks[0][str(codec)]
        assert steps == STEPS
        assert all(v.isfinite().all() for v in values), codec
        assert losses[-1] < losses[0], codec
    assert equal(ranks[0]["none"][0], ranks[0]["None"][0])
