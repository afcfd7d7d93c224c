"""Factors and owners under DDP: the mean gradient, the same bits everywhere, in every way a model can be used."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commlib
from commlib.exchange.registry import BY_ROWS
from commlib.groups.world import World
from commlib.runtime.autograd import ReadyHook
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import Trainer, same_everywhere

WIDTH = 64  # of layers that rows pay for on three ranks, by owners too
BOUND = 2e-6  # of the largest value: P·K products of float32 added in another order


class Twice(nn.Module):
    """A layer that is called twice, one that is not used by every rank, and one whose weight is tied."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.kind = kind
        self.a, self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        if kind == "tied":
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh()
        if self.kind == "twice":
            x = self.a(x).tanh()
        if self.kind in ("checkpoint", "reentrant"):
            x = checkpoint(lambda y: self.b(self.b(y).tanh()).tanh(), x, use_reentrant=self.kind == "reentrant")
        elif self.kind != "unused" or dist.get_rank() == 0:
            x = self.b(x).tanh()
        y: Tensor = self.c(x)
        if self.kind == "elsewhere" or (self.kind == "elsewhere on one" and dist.get_rank() == 1):
            y = y + self.a.weight.square().sum()  # its gradient comes when the rows have left
        return y


def gradients(
    world: World, rule: Any, step: Callable[[DistributedDataParallel, World], None], kind: str
) -> list[Tensor]:
    module = Twice(kind)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.001, find_unused_parameters=kind == "unused")
    comm = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    grads: list[Tensor] = []
    for _ in range(3):
        ddp.zero_grad()
        step(ddp, world)
        grads += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
    if comm is not None:
        comm.close()
    return grads


def data(world: World, rows: int, part: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(100 * part + world.rank)
    return torch.randn(rows, WIDTH, generator=gen)


def plain(ddp: DistributedDataParallel, world: World) -> None:
    ddp(data(world, 8)).square().mean().backward()


def unequal(ddp: DistributedDataParallel, world: World) -> None:
    ddp(data(world, 3 + 4 * world.rank)).square().mean().backward()


def three_dimensions(ddp: DistributedDataParallel, world: World) -> None:
    ddp(data(world, 12).view(3, 4, WIDTH)).square().sum().backward()


def accumulated(ddp: DistributedDataParallel, world: World) -> None:
    x = data(world, 4, 0)
    with ddp.no_sync():
        ddp(x).square().mean().backward()
    x.copy_(data(world, 4, 1))  # the buffer is used again
    ddp(x).square().mean().backward()


def without_no_sync(ddp: DistributedDataParallel, world: World) -> None:
    for part in range(2):
        ddp(data(world, 4, part)).square().mean().backward()


def under_autocast(ddp: DistributedDataParallel, world: World) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ddp(data(world, 8)).float().square().mean()
    loss.backward()


def beside_ddp(ddp: DistributedDataParallel, world: World) -> None:
    """Rank 0 alone uses the module itself, after a step and after an evaluation; the next step adds to what it left."""
    plain(ddp, world)
    for look in range(2):
        if look:
            with torch.no_grad():
                ddp(data(world, 3))
        if world.rank == 0:
            ddp.module(data(world, 5, 9)).square().mean().backward()
    plain(ddp, world)


STEPS: dict[str, Callable[[DistributedDataParallel, World], None]] = {
    f.__name__: f for f in (plain, unequal, three_dimensions, accumulated, without_no_sync, under_autocast, beside_ddp)
}
KINDS = ("plain", "twice", "tied", "unused", "checkpoint", "reentrant", "elsewhere", "elsewhere on one")


def compare(world: World, step: str, kind: str, rule: str = "factors") -> tuple[float, bool]:
    ours = gradients(world, rule, STEPS[step], kind)
    ddps = gradients(world, None, STEPS[step], kind)
    off = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-9)) for a, b in zip(ours, ddps, strict=True))
    return off, same_everywhere(world, torch.cat([g.reshape(-1) for g in ours]))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("size", "rule"), [(3, "factors"), (3, "owners"), *full((2, "factors"))])
def test_the_gradient_is_that_of_an_all_reduce_and_the_same_bits_everywhere(
    fleet: Fleet, size: int, rule: str, step: str
) -> None:
    for off, same in fleet.run(size, compare, step, "plain", rule):
        assert same
        # bfloat16 rows lose nothing more; it is DDP's local product that is rounded to 8 bits.
        assert off < (0.02 if step == "under_autocast" else BOUND)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", BY_ROWS)
def test_however_a_layer_is_used(fleet: Fleet, rule: str, kind: str) -> None:
    for off, same in fleet.run(2, compare, "plain", kind, rule):
        assert same
        assert off < BOUND


CODECS = {"bf16": 0.01, "fp16": 0.002, "int8": 0.02, "qsgd:levels=32767": 0.01}


@pytest.mark.parametrize("codec", ["int8", *full(*(codec for codec in CODECS if codec != "int8"))])
@pytest.mark.parametrize("step", STEPS)
def test_compressed_rows_give_nearly_the_mean_gradient_and_the_same_bits_everywhere(
    fleet: Fleet, step: str, codec: str
) -> None:
    for off, same in fleet.run(2, compare, step, "plain", f"{codec}@factors"):
        assert same
        assert off < CODECS[codec] + 0.02 * (step == "under_autocast")


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_rows_however_a_layer_is_used(fleet: Fleet, kind: str) -> None:
    for off, same in fleet.run(3, compare, "plain", kind, "bf16@factors"):
        assert same
        assert off < 0.02


def drawn(world: World) -> list[Tensor]:
    """Two steps from the beginning, twice: the first run goes on, the second resumes after a step."""
    runs: list[Tensor] = []
    saved: dict[str, Any] = {}
    for begin in (0, 1):
        ddp = DistributedDataParallel(Twice("plain"), bucket_cap_mb=0.001)
        comm = commlib.attach(ddp, "qsgd@factors", min_size=0, seed=3)
        if begin:
            comm.load_state_dict(saved)
        for step in range(begin, 2):
            ddp.zero_grad()
            plain(ddp, world)
            if step == 0:
                saved = comm.state_dict()
        runs.append(torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None]))
        comm.close()
    return runs


def test_random_codecs_of_rows_draw_the_same_after_a_resume(fleet: Fleet) -> None:
    for straight, resumed in fleet.run(2, drawn):
        assert torch.equal(straight, resumed)


def spoilt(world: World, codec: str) -> list[bool]:
    """Whether gradients are finite: in a usual step, in one that is not finite on rank 1, and in the next."""
    ddp = DistributedDataParallel(Twice("plain"), bucket_cap_mb=0.001)
    comm = commlib.attach(ddp, f"{codec}@factors", min_size=0)
    finite = []
    for factor in (1.0, float("inf") if world.rank else 1.0, 1.0):
        ddp.zero_grad()
        (ddp(data(world, 8)).square().mean() * factor).backward()
        finite.append(all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None))
    comm.close()
    return finite


@pytest.mark.parametrize("codec", CODECS)
def test_a_step_that_is_not_finite_anywhere_is_so_everywhere_and_leaves_no_trace(fleet: Fleet, codec: str) -> None:
    assert fleet.run(2, spoilt, codec) == [[True, False, True]] * 2


def plan_of(world: World, kind: str, rule: str) -> dict[str, str]:
    ddp = DistributedDataParallel(Twice(kind))
    comm = commlib.attach(ddp, rule, min_size=0)
    comm.close()
    return {p.spec.name: p.route.exchange for p in comm.plan}


@pytest.mark.parametrize("rule", BY_ROWS)
def test_a_layer_that_shares_its_weight_is_dense_and_a_bias_goes_with_its_weight(fleet: Fleet, rule: str) -> None:
    plan = fleet.run(2, plan_of, "tied", rule)[0]
    assert plan == {
        "a.weight": "dense",
        "a.bias": "dense",
        "b.bias": "dense",
        "c.weight": rule,
        "c.bias": rule,
    }


def not_reduced(world: World, how: str) -> tuple[str, bool]:
    module = Twice("plain")
    if how == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["b.weight", "b.bias"])
    module.b.requires_grad_(how == "ignored")
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.001)
    module.b.requires_grad_(True)
    comm = commlib.attach(ddp, "factors", min_size=0)
    try:
        plain(ddp, world)
    except Exception as e:
        return str(e), False
    finally:
        comm.close()
    return "", module.b.weight.grad is not None and bool(module.b.weight.grad.any())


def test_a_layer_that_ddp_ignores_keeps_its_own_gradient(fleet: Fleet) -> None:
    assert fleet.run(2, not_reduced, "ignored") == [("", True)] * 2


def test_a_layer_frozen_when_the_model_was_wrapped_keeps_its_own_gradient_as_with_ddp(fleet: Fleet) -> None:
    assert fleet.run(2, not_reduced, "frozen") == [("", True)] * 2


class Critic(nn.Module):
    """Its loss may take the gradient of its output for its input, as a gradient penalty does."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, 1, bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).tanh())
        return y


def with_penalty(world: World, rule: Any, bias: bool) -> tuple[list[Tensor], Tensor]:
    ddp = DistributedDataParallel(Critic(bias=bias), bucket_cap_mb=0.001)
    comm = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    x = data(world, 6).requires_grad_()
    score = ddp(x)
    direct = torch.autograd.grad(score.sum(), ddp.module.a.weight, retain_graph=True)[0]
    slope = torch.autograd.grad(score.sum(), x, create_graph=True)[0]
    (score.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
    grads = [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
    if comm is not None:
        comm.close()
    return grads, direct


def penalised(world: World, rule: str, bias: bool) -> tuple[float, bool, bool]:
    ours, direct = with_penalty(world, rule, bias)
    ddps, plain_direct = with_penalty(world, None, bias)
    off = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-9)) for a, b in zip(ours, ddps, strict=True))
    flat = torch.cat([g.reshape(-1) for g in ours])
    return off, same_everywhere(world, flat), torch.allclose(direct, plain_direct)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rule", BY_ROWS)
def test_autograd_grad_and_double_backward_see_the_gradient_itself(fleet: Fleet, rule: str, bias: bool) -> None:
    for off, same, direct in fleet.run(2, penalised, rule, bias):
        assert off < BOUND
        assert same
        assert direct


def under_way(world: World, rule: str | None, options: dict[str, Any]) -> tuple[list[bool], list[Tensor]]:
    """Whether the second layer has a ``grad`` when the first one's backward pass begins; the last gradients."""
    ddp = DistributedDataParallel(Twice("plain"), bucket_cap_mb=0.001, **options)
    comm = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    module, seen = ddp.module, list[bool]()
    module.a.register_full_backward_pre_hook(lambda *_: seen.append(module.b.weight.grad is not None))
    for _ in range(3):
        ddp.zero_grad()
        plain(ddp, world)
    if comm is not None:
        comm.close()
    return seen, [p.grad for p in ddp.parameters() if p.grad is not None]


def memory_under_way(world: World, rule: str, options: dict[str, Any]) -> tuple[list[bool], list[bool], float]:
    seen, ours = under_way(world, rule, options)
    usual, ddps = under_way(world, None, options)
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, ddps, strict=True))
    return seen, usual, off


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
@pytest.mark.parametrize("rule", BY_ROWS)
def test_a_layer_whose_rows_leave_takes_no_memory_for_a_gradient_before_the_mean_comes(
    fleet: Fleet, rule: str, options: dict[str, Any]
) -> None:
    for seen, usual, off in fleet.run(2, memory_under_way, rule, options):
        assert seen == [False] * 3
        assert usual == [True] * 3  # DDP, too, sees it earlier than the end of the backward pass
        assert off < BOUND


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("views", [False, True])
def test_where_ddp_looks_for_unused_parameters_a_layer_whose_rows_leave_has_its_gradient_all_the_same(
    fleet: Fleet, option: str, views: bool
) -> None:
    for *_, off in fleet.run(2, memory_under_way, "factors", {option: True, "gradient_as_bucket_view": views}):
        assert off < BOUND


def rows_sent(world: World, rule: str) -> list[float]:
    trainer = Trainer(world, rule, dense_steps=2)
    sent = []
    for _ in range(5):
        before = trainer.comm.stats().wire_bytes
        trainer.train(1)
        sent.append(trainer.comm.stats().wire_bytes - before)
    trainer.close()
    return sent


def test_after_the_dense_steps_and_a_first_one_only_rows_and_a_word_of_each_layer_travel(fleet: Fleet) -> None:
    weights = [(48, 64), (48, 48), (5, 48)]
    dense = sum(n * m + n for n, m in weights) * 4  # between two ranks a ring sends each value once
    rows = sum(8 * (n + m) * 4 for n, m in weights[:2])
    words = 3 * 16
    small = (5 * 48 + 5) * 4  # its word says: fewer bytes in all if we sum the matrices
    for sent in fleet.run(2, rows_sent, "factors"):
        assert sent == [dense, dense, *[rows + small + words] * 3]


def test_after_the_dense_steps_owners_get_their_columns_and_send_their_blocks(fleet: Fleet) -> None:
    rows = (8 * (48 + 32) + 8 * (48 + 24)) * 4  # of 48 × 64 the inputs are cut, of 48 × 48 the outputs
    blocks = (24 * 64 + 24 * 48) * 4 + 2 * 24 * 4  # of weights and biases
    words, small = 3 * 16, (5 * 48 + 5) * 4
    for sent in fleet.run(2, rows_sent, "owners"):
        assert sent[3:] == [rows + blocks + small + words] * 2


def events(world: World, rule: str) -> list[str]:
    seen: list[str] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    ddp = DistributedDataParallel(model)
    comm = commlib.attach(ddp, rule, min_size=0)
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, p in parameters.items():  # another's hook would have the layer compute its gradient
        p.register_post_accumulate_grad_hook(ReadyHook(functools.partial(seen.append, name)))
    group: Any = dist.ProcessGroup
    how = {"factors": "_allgather_base", "owners": "alltoall_base"}[rule]
    send = group.__dict__[how]

    def spy(self: Any, *args: Any) -> Any:
        seen.append("rows leave")
        return send.__get__(self, type(self))(*args)

    setattr(group, how, spy)
    try:
        for _ in range(2):  # in the first one there is no room yet
            seen.clear()
            ddp(data(world, 8)).square().mean().backward()
    finally:
        setattr(group, how, send)
    comm.close()
    return seen


@pytest.mark.parametrize("rule", BY_ROWS)
def test_rows_leave_before_the_weight_gradient_would_exist(fleet: Fleet, rule: str) -> None:
    for seen in fleet.run(2, events, rule):
        assert seen.index("2.weight") < seen.index("rows leave") < seen.index("0.weight")


def copies(world: World) -> list[bool]:
    model = nn.Sequential(nn.Linear(WIDTH, 4))
    ddp = DistributedDataParallel(model)
    comm = commlib.attach(ddp, "factors", min_size=0)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False)]
    x = data(world, 3)
    with torch.no_grad():
        same = all(torch.equal(t(x), model(x)) for t in twins)
    comm.close()
    return [type(t[0]) is nn.Linear and same and f"Linear(in_features={WIDTH}" in repr(model) for t in twins]


def test_copies_of_the_model_are_plain(fleet: Fleet) -> None:
    assert fleet.run(2, copies) == [[True] * 3] * 2


def compiled(world: World, outer: bool) -> tuple[float, bool, set[str]]:
    found = []
    exchanges: set[str] = set()
    for rule in ("factors", None):
        module: Any = Twice("plain")
        ddp = DistributedDataParallel(module if outer else torch.compile(module, backend="aot_eager"))
        if rule is not None:
            comm = commlib.attach(ddp, rule, min_size=0)
            exchanges = {p.route.exchange for p in comm.plan}
        call: Any = torch.compile(ddp, backend="aot_eager") if outer else ddp
        for _ in range(2):
            ddp.zero_grad()
            call(data(world, 8)).square().mean().backward()
        found.append(torch.cat([p.grad.reshape(-1).clone() for p in ddp.parameters() if p.grad is not None]))
        if rule is not None:
            comm.close()
    ours, ddps = found
    return float((ours - ddps).abs().max() / ddps.abs().max()), same_everywhere(world, ours), exchanges


@pytest.mark.full
@pytest.mark.parametrize("outer", [False, *full(True)])
def test_under_torch_compile(fleet: Fleet, outer: bool) -> None:
    for off, same, exchanges in fleet.run(2, compiled, outer):
        assert exchanges == {"factors"}
        assert same
        assert off < BOUND


def refusals(world: World) -> list[str]:
    said = []
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 4))
    for target, rule in (
        (module, "factors"),
        (DistributedDataParallel(module), "powersgd:rank=2@factors"),
        (DistributedDataParallel(module), "bf16@owners"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            commlib.HookState(target, rule, min_size=0)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_is_refused_in_words(fleet: Fleet) -> None:
    for inner, coded, owned in fleet.run(2, refusals):
        assert "rows by a codec go over factors" in owned
        assert "attach to the DistributedDataParallel itself" in inner
        assert "it keeps a memory of its layer" in coded


def threads_differ(world: World, rule: str) -> str:
    torch.set_num_threads(1 + world.rank)
    try:
        commlib.attach(DistributedDataParallel(nn.Linear(64, 64)), rule, timeout=120).close()
    except commlib.PlanMismatch as e:
        return str(e)
    finally:
        torch.set_num_threads(1)
    return "no error"


def test_ranks_that_would_multiply_differently_are_told(fleet: Fleet) -> None:
    for said in fleet.run(2, threads_differ, "factors"):
        assert "threads" in said


def test_owners_may_multiply_differently(fleet: Fleet) -> None:
    assert fleet.run(2, threads_differ, "owners") == ["no error"] * 2
