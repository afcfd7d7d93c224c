"""Whatever model and loop plain DDP trains, commlib trains with DDP's gradients: a table of kinds × routes × ranks."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange.factors import layers
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import head, same_everywhere
from tests.support.unusual_loops import SEEN
from tests.support.unusual_models import CASES
from tests.support.unusual_modules import WIDTH

EXACT = ("none", "factors", "owners", "auto")
CODECS = ("onebit", "topk:ratio=0.5", "powersgd:rank=1", "int8")
STEPS = 4

Grads = list[Tensor | None]


def gradients(world: World, name: str, rule: str | None) -> tuple[list[Grads], list[Tensor], dict[str, str]]:
    """All parameters' gradients after each step, what hooks saw, and the routes at the end with their reasons."""
    case = CASES[name]
    torch.manual_seed(7)
    with head(1) if rule == "auto" else contextlib.nullcontext():  # after one dense step all rows are chosen
        ddp = DistributedDataParallel(case.model(), bucket_cap_mb=0.0003, **case.ddp)
        comm: Any = None if rule is None else commlib.attach(ddp, rule, min_size=0)
        kept = case.before(ddp)
        SEEN.clear()
        found = []
        for step in range(STEPS):
            ddp.zero_grad()
            case.step(ddp, _batch(world, step), world.rank)
            found.append([None if p.grad is None else p.grad.detach().clone() for p in ddp.module.parameters()])
        del kept
    plan = {} if comm is None else {p.spec.name: f"{p.route} ({p.reason})" for p in comm.plan}
    if comm is not None:
        comm.close()
    return found, list(SEEN), plan


def _batch(world: World, step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + world.rank))


def plainly(world: World, name: str) -> tuple[list[Grads], list[Tensor]]:
    """DDP's own gradients, and what hooks saw; they are the same each time, and worked out once by a process."""
    key = world.rank, world.size, name
    if key not in _PLAIN:
        _PLAIN[key] = gradients(world, name, None)[:2]
    return _PLAIN[key]


_PLAIN: dict[tuple[int, int, str], tuple[list[Grads], list[Tensor]]] = {}


def off(ours: list[Grads], plain: list[Grads]) -> float:
    """Largest difference, relative to the largest value of that gradient; infinite if one has a gradient alone."""
    worst = 0.0
    for mine, theirs in zip(ours, plain, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            if a is None and b is None:
                continue
            if a is None or b is None or a.shape != b.shape:
                return float("inf")
            if a.numel():
                worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)))
    return worst


def table(world: World, rule: str, names: list[str]) -> dict[str, str]:
    """Name of each case that does not end right → what was wrong."""
    wrong = {}
    for name in names:
        try:
            plain, saw = plainly(world, name)
            ours, seen, plan = gradients(world, name, rule)
            exact = rule in EXACT
            if exact and not (found := off(ours, plain)) <= (CASES[name].bound if rule != "none" else 0.0):
                wrong[name] = f"off by {found:.1e}; {plan}"
            elif exact and (len(seen) != len(saw) or not all(map(_close, seen, saw))):
                wrong[name] = f"hooks have seen other gradients; {plan}"
            elif not exact and [[g is None for g in s] for s in ours] != [[g is None for g in s] for s in plain]:
                wrong[name] = f"gradients where DDP has none, or none where it has some; {plan}"
            flat = torch.cat([g.reshape(-1) for grads in ours for g in grads if g is not None])
            if CASES[name].alike and not same_everywhere(world, flat):
                wrong[name] = f"ranks have unlike gradients; {plan}"
        except Exception as e:
            wrong[name] = f"{type(e).__name__}: {e}"
    return wrong


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


PARTS = [list(CASES)[i::4] for i in range(4)]


@pytest.mark.parametrize("size", [2, *full(3)])
@pytest.mark.parametrize("names", PARTS, ids=range(len(PARTS)))
@pytest.mark.parametrize("rule", EXACT)
def test_exact_routes_have_ddps_gradients(fleet: Fleet, rule: str, names: list[str], size: int) -> None:
    for wrong in fleet.run(size, table, rule, names):
        assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


@pytest.mark.parametrize("names", PARTS, ids=range(len(PARTS)))
@pytest.mark.parametrize("rule", [CODECS[0], *full(*CODECS[1:])])
def test_codecs_train_them_and_ranks_stay_equal(fleet: Fleet, rule: str, names: list[str]) -> None:
    for wrong in fleet.run(2, table, rule, names):
        assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


class Shared(nn.Module):
    """A layer of one model that another model has, too."""

    def __init__(self, common: nn.Module) -> None:
        super().__init__()
        self.common, self.own = common, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.own(self.common(x))
        return y


def two_models(world: World, rule: str | None, other: str | None, late: bool) -> list[Tensor]:
    """Gradients of two DDP models that share a layer, each with its route; the second made after the first attached."""
    torch.manual_seed(3)
    common = nn.Linear(WIDTH, WIDTH)
    parts = [Shared(common), Shared(common)]
    models, comms = [], []
    for part, own in zip(parts, (rule, other), strict=True):
        models.append(DistributedDataParallel(part, bucket_cap_mb=0.0003))
        if own is not None and not late:
            comms.append(commlib.attach(models[-1], own, min_size=0))
    if late:
        comms = [commlib.attach(m, own, min_size=0) for m, own in zip(models, (rule, other), strict=True) if own]
    found = []
    for step in range(3):
        for module in parts:
            module.zero_grad()
        x = _batch(world, step)
        (models[0](x).square().mean() + models[1](x + 1).square().mean()).backward()
        found += [p.grad.clone() for module in parts for p in module.parameters() if p.grad is not None]
    for comm in comms:
        comm.close()
    return found


@pytest.mark.parametrize("late", [False, True], ids=["one by one", "both made before"])
@pytest.mark.parametrize("other", [None, "factors"], ids=["beside plain DDP", "beside factors"])
def test_a_layer_of_two_ddp_models_is_dense_in_both(fleet: Fleet, other: str | None, late: bool) -> None:
    for plain, ours in zip(
        fleet.run(2, two_models, None, None, late), fleet.run(2, two_models, "factors", other, late), strict=True
    ):
        assert len(plain) == len(ours)
        for a, b in zip(plain, ours, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def copied(world: World, rule: str | None) -> list[Tensor]:
    """Gradients of a DDP model, and from the third step on of a shallow copy of it, too: two models that share all."""
    torch.manual_seed(3)
    module = Shared(nn.Linear(WIDTH, WIDTH))
    ddp, found = DistributedDataParallel(module), []
    comm = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    models = [ddp]
    for step in range(5):
        if step == 2:
            models.append(copy.copy(ddp))
        module.zero_grad()
        x = _batch(world, step)
        sum(m(x + i).square().mean() for i, m in enumerate(models)).backward()
        found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    if comm is not None:
        comm.close()
    return found


def test_a_model_and_a_shallow_copy_of_it_have_ddps_gradients(fleet: Fleet) -> None:
    for plain, ours in zip(fleet.run(2, copied, None), fleet.run(2, copied, "factors"), strict=True):
        assert len(plain) == len(ours)
        for a, b in zip(plain, ours, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def unread(world: World) -> tuple[float, str]:
    """How far gradients are off, and the plan, where rank 1 cannot find out which layers other models share."""
    plain, _ = plainly(world, "plain")
    original = vars(layers)["sharing"]
    if world.rank == 1:
        vars(layers)["sharing"] = lambda *_: 1 / 0
    try:
        ours, _, plan = gradients(world, "plain", "factors")
    finally:
        vars(layers)["sharing"] = original
    return off(ours, plain), str(plan)


def test_layers_are_dense_where_it_is_not_known_who_shares_them(fleet: Fleet) -> None:
    (first, _), (second, plan) = fleet.run(2, unread)
    assert max(first, second) <= 2e-6
    assert f"dense in {STEPS} steps" in plan


def ordinary(world: World, rule: str) -> list[str]:
    """What the layers of an attached model are between two steps; scripted, traced, saved and loaded in between."""
    with head(1) if rule == "auto" else contextlib.nullcontext():
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
        ddp = DistributedDataParallel(module)
        comm = commlib.attach(ddp, rule, min_size=0)
        wrong = []
        for step in range(3):
            ddp(_batch(world, step)).sum().backward()
            wrong += [f"{type(m)} in step {step}" for m in module if type(m) not in (nn.Linear, nn.Tanh)]
            torch.jit.script(module)
            torch.fx.symbolic_trace(module)
        comm.close()
    return wrong


@pytest.mark.parametrize("rule", ["factors", "auto"])
def test_between_two_steps_the_model_is_made_of_ordinary_layers(fleet: Fleet, rule: str) -> None:
    assert fleet.run(2, ordinary, rule) == [[], []]


def reason(world: World) -> tuple[str, str]:
    """The plan's reason for a layer that was foreign on rank 0 in one step, and for another one."""
    ddp = DistributedDataParallel(Shared(nn.Linear(WIDTH, WIDTH)))
    comm = commlib.attach(ddp, "factors", min_size=0)
    for step in range(3):
        ddp.zero_grad()
        loss = ddp(_batch(world, step)).square().mean()
        if world.rank == 0 and step == 1:
            loss = loss + ddp.module.common.weight.sum()
        loss.backward()
    plan = comm.plan.layers
    comm.close()
    return plan["common.weight"].reason, plan["own.weight"].reason


def test_the_plan_says_why_a_layer_went_dense(fleet: Fleet) -> None:
    (first, other), *_ = fleet.run(2, reason)
    assert "dense in 1 steps: gradient that is not of its rows has reached a parameter" in first
    assert "dense" not in other
