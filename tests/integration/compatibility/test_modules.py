"""Models and options of DDP that a user may bring: against plain DDP, with exact routes and lossy ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import commlib
from commlib.exchange.registry import BY_ROWS
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import batch, model, owed, same_everywhere

EXACT = ("none", *BY_ROWS, "auto")
LOSSY = ("onebit", "powersgd:rank=2")
STEPS = 4


class Net(nn.Module):
    """64 → 48 → 48 → 5, in one of several manners."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(1234)
        self.kind = kind
        self.first, self.second, self.last = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 5)
        if kind == "tied":
            self.third = nn.Linear(48, 48)
            self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.kind in ("checkpoint", "reentrant"):
            x = checkpoint(lambda y: torch.tanh(self.second(y)), x, use_reentrant=self.kind == "reentrant")
        else:
            x = torch.tanh(self.second(x))
        if self.kind == "tied":
            x = torch.tanh(self.third(x))
        y: Tensor = self.last(x)
        return y


class LowRank(nn.Module):
    """A frozen layer, and beside it two thin ones that are trained: what LoRA puts in a layer's place."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


def adapted() -> nn.Module:
    net = Net()
    net.first, net.second = LowRank(net.first), LowRank(net.second)  # type: ignore[assignment]
    net.last.requires_grad_(False)
    return net


def parametrized() -> nn.Module:
    net = Net()
    weight_norm(net.first)
    spectral_norm(net.second)
    orthogonal(net.last)
    return net


def bfloat16() -> nn.Module:
    return Net().bfloat16()


def float64() -> nn.Module:
    return Net().double()


def with_statistics() -> nn.Module:
    torch.manual_seed(1234)
    return nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Linear(48, 5))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, options of DDP, and how far an exact route may be from DDP, of the largest value."""

    model: Callable[[], nn.Module] = Net
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    autocast: bool = False
    bound: float = 1e-5


CASES = {
    "parametrizations": Case(parametrized),
    "low-rank adapters": Case(adapted),
    "checkpoint": Case(lambda: Net("checkpoint")),
    "checkpoint, reentrant": Case(lambda: Net("reentrant")),
    "checkpoint in a static graph": Case(lambda: Net("checkpoint"), {"static_graph": True}),
    "tied weights": Case(lambda: Net("tied")),
    "static graph": Case(ddp={"static_graph": True}),
    "find_unused_parameters": Case(ddp={"find_unused_parameters": True}),
    "gradient_as_bucket_view": Case(ddp={"gradient_as_bucket_view": True}),
    "bfloat16": Case(bfloat16, bound=0.05),
    "float64": Case(float64, bound=1e-12),
    "autocast": Case(autocast=True, bound=0.05),
    "BatchNorm's buffers": Case(with_statistics),
}


def trained(world: World, case: Case, rule: str | None) -> tuple[Tensor, Tensor, set[str]]:
    """Every gradient; parameters and buffers at the end; exchanges."""
    ddp = DistributedDataParallel(case.model(), bucket_cap_mb=0.005, **case.ddp)
    comm: Any = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    routes = set() if comm is None else {p.route.exchange for p in comm.plan}
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.05)
    dtype, grads = next(ddp.parameters()).dtype, []
    for step in range(STEPS):
        x, y = batch(world, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            out = ddp(x.to(dtype))
        nn.functional.cross_entropy(out.to(torch.float64 if dtype == torch.float64 else torch.float32), y).backward()
        grads.append(torch.cat([p.grad.reshape(-1).double() for p in ddp.parameters() if p.grad is not None]))
        optimizer.step()
    if comm is not None:
        assert comm.stats().steps == STEPS
        comm.close()
    left = [p.detach() for p in ddp.parameters()] + [b for b in ddp.buffers() if b.is_floating_point()]
    return torch.stack(grads), torch.cat([t.reshape(-1).double() for t in left]), routes


def compared(world: World, name: str) -> dict[str, tuple[float, bool, set[str]]]:
    case = CASES[name]
    plain, *_ = trained(world, case, None)
    found = {}
    for rule in (*EXACT, *LOSSY):
        grads, left, routes = trained(world, case, rule)
        off = float((grads - plain).abs().max() / plain.abs().max())
        found[rule] = off, same_everywhere(world, left) or bool(name == "BatchNorm's buffers"), routes
    return found


SOME = list(CASES)[::4]


@pytest.mark.parametrize("name", [*SOME, *full(*(name for name in CASES if name not in SOME))])
def test_exact_routes_train_as_plain_ddp_and_replicas_are_equal(fleet: Fleet, name: str) -> None:
    for found in fleet.run(2, compared, name):
        assert found["none"][0] == 0
        for rule in EXACT:
            assert found[rule][0] <= CASES[name].bound, (rule, found[rule])
        assert all(same for _, same, _ in found.values()), found
        if name not in ("parametrizations",):
            assert "factors" in found["factors"][2]


def ignored_and_delayed(world: World, how: str) -> dict[str, bool]:
    """DDP's own exceptions: what they are for is left alone, and all else goes by the plan."""
    net = Net()
    odd = [("last.weight", net.last.weight), ("last.bias", net.last.bias)]
    options: dict[str, Any] = {}
    if how == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [name for name, _ in odd])
    else:
        options = {"delay_all_reduce_named_params": odd, "param_to_hook_all_reduce": net.first.weight}
    ddp = DistributedDataParallel(net, **options)
    comm = commlib.attach(ddp, "onebit", min_size=0)
    x, y = batch(world, 0)
    nn.functional.cross_entropy(ddp(x), y).backward()
    found = {"not planned": not {n for n, _ in odd} & {p.spec.name for p in comm.plan}}
    found["planned"] = all(
        same_everywhere(world, p.grad) for n, p in net.named_parameters() if n[:4] != "last" and p.grad is not None
    )
    found["counted"] = comm.stats().steps == 1
    if how == "ignored":
        own = net.last.weight.grad
        found["own"] = own is not None and not same_everywhere(world, own)
    comm.close()
    return found


@pytest.mark.parametrize("how", ["ignored", "delayed"])
def test_parameters_that_ddp_leaves_out_are_left_alone(fleet: Fleet, how: str) -> None:
    for found in fleet.run(2, ignored_and_delayed, how):
        assert all(found.values()), found


def delayed_all(world: World, rule: str | None) -> str:
    net = Net()
    with pytest.raises(ValueError, match="same type of devices") as caught:
        DistributedDataParallel(
            net, delay_all_reduce_named_params=list(net.named_parameters()), param_to_hook_all_reduce=net.first.weight
        )
    return str(caught.value)


def test_to_delay_all_of_them_is_refused_by_pytorch_itself(fleet: Fleet) -> None:
    assert len(set(fleet.run(2, delayed_all, None))) == 1


def mixed_precision(world: World) -> list[str]:
    said = []
    for make in (commlib.attach, commlib.HookState):
        low = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        ddp = DistributedDataParallel(Net(), mixed_precision=low)
        with pytest.raises(ValueError, match="communication hook") as caught:
            make(ddp, "onebit")
        said.append(str(caught.value))
    return said


def test_ddps_own_mixed_precision_is_refused_by_name(fleet: Fleet) -> None:
    for said in fleet.run(2, mixed_precision):
        assert all("DDP's mixed_precision=; use torch.autocast, or a model in bfloat16" in s for s in said)


class Complex(nn.Module):
    """A complex parameter among others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 5)
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) * self.phase.abs()
        return y


def grads_of(ddp: nn.Module) -> list[Tensor]:
    return [p.grad for p in ddp.parameters() if p.grad is not None]


def complex_one(world: World, rule: str, options: dict[str, Any]) -> tuple[float, str]:
    """How far the gradients of five steps are from DDP's, and the complex parameter's line of the plan."""
    found, comm = [], None
    for attached in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Complex(), init_sync=False)  # torch 2.7 broadcasts nothing complex over Gloo
        if attached:
            comm = commlib.attach(ddp, rule, min_size=0, **options)
        for step in range(5):
            ddp.zero_grad()
            ddp(batch(world, step)[0]).square().mean().backward()
            found.append(torch.cat([torch.view_as_real(g + 0j).reshape(-1) for g in grads_of(ddp)]))
    plain, ours = torch.stack(found[:5]), torch.stack(found[5:])
    off = float((ours - plain).abs().max() / plain.abs().max())
    assert comm is not None
    comm.close()
    return off, str(comm.plan.layers["phase"].route)


@pytest.mark.parametrize(
    ("rule", "options", "bound"),
    [
        ("auto", {}, 0.0),
        ("none", {}, 0.0),
        ("none", {"check_replicas": 2}, 0.0),
        ("factors", {}, 2e-6),
        ("fp16:ef=off", {}, 2e-3),
        ("onebit", {"dense_steps": 5}, 0.0),
    ],
    ids=str,
)
def test_a_complex_parameter_goes_as_its_real_and_imaginary_parts(
    fleet: Fleet, rule: str, options: dict[str, Any], bound: float
) -> None:
    for off, _ in fleet.run(2, complex_one, rule, options):
        assert off <= bound


def detached(world: World) -> bool:
    """Whether gradients are DDP's after :meth:`detach` of a model with a complex parameter, a hook staying in place."""
    torch.manual_seed(0)
    plain, ours = (DistributedDataParallel(Complex(), init_sync=False) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    comm = commlib.attach(ours, "onebit", min_size=0)
    for ddp in (plain, ours):
        ddp(batch(world, 0)[0]).square().mean().backward()
    comm.detach()
    for ddp in (plain, ours):
        ddp.zero_grad()
        ddp(batch(world, 1)[0]).square().mean().backward()
    return all(map(torch.equal, grads_of(plain), grads_of(ours)))


def test_a_complex_parameter_goes_by_ddp_again_after_detach(fleet: Fleet) -> None:
    assert all(fleet.run(2, detached))


def elsewhere(world: World) -> tuple[str, str]:
    """What is refused."""
    said = []
    model = Complex()
    for make in (
        lambda: commlib.ShardedStep(model, torch.optim.SGD(model.parameters())),
        lambda: commlib.LocalSteps(model),
    ):
        with pytest.raises(TypeError) as caught:
            make()
        said.append(str(caught.value))
    return said[0], said[1]


def test_sharded_steps_and_local_steps_refuse_a_complex_parameter_by_name(fleet: Fleet) -> None:
    for said in fleet.run(2, elsewhere):
        assert all("parameter 'phase' is torch.complex64" in s for s in said), said


def double_residual(world: World) -> bool:
    """float64 by a codec: what was sent and what is owed are the gradients, up to float32."""
    ddp = DistributedDataParallel(Net().double(), bucket_cap_mb=0.005)
    comm = commlib.attach(ddp, "onebit@gather", min_size=0)
    plain = DistributedDataParallel(Net().double(), bucket_cap_mb=0.005)
    sent, given = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    for step in range(STEPS):
        x, y = batch(world, step)
        for module in (ddp, plain):
            module.zero_grad()
            nn.functional.cross_entropy(module(x.double()), y).backward()
        sent = sent + ddp.module.first.weight.grad
        given = given + plain.module.first.weight.grad
    pending = owed([comm.state_dict()])["first.weight"]
    torch.distributed.all_reduce(pending)
    comm.close()
    off = (sent + pending - given).abs().max() / given.abs().max()
    return sent.dtype == torch.float64 and float(off) < 1e-5


def test_in_float64_nothing_is_lost_beyond_float32(fleet: Fleet) -> None:
    assert fleet.run(2, double_residual) == [True] * 2


def toggled(world: World, rule: str | None, when: str) -> str:
    ddp = DistributedDataParallel(Net())
    if when == "before attach":
        ddp.module.second.requires_grad_(False)
    comm = None if rule is None else commlib.attach(ddp, rule)
    if when == "after attach":
        ddp.module.second.requires_grad_(False)
    said = "no error"
    try:
        for step in range(2):
            x, y = batch(world, step)
            nn.functional.cross_entropy(ddp(x), y).backward()
    except RuntimeError as e:
        said = str(e)
    if comm is not None:
        comm.close()
    return said


@pytest.mark.parametrize("when", ["before attach", "after attach"])
@pytest.mark.parametrize("rule", [None, "none", "onebit", "factors"])
def test_a_layer_frozen_under_ddp_is_ddps_own_error(fleet: Fleet, rule: str | None, when: str) -> None:
    for said in fleet.run(2, toggled, rule, when):
        assert "Expected to have finished reduction in the prior iteration" in said


def synchronized(world: World) -> str:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(with_statistics())
    try:
        DistributedDataParallel(net)(batch(world, 0)[0])
    except (RuntimeError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def test_sync_batch_norm_is_for_gpus_as_pytorch_says(fleet: Fleet) -> None:
    for said in fleet.run(2, synchronized):
        assert "GPU" in said


# -- clipping -------------------------------------------------------------------------------------


def clipped(world: World, rule: str, amp: bool) -> dict[str, Any]:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.005)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if amp else None
    comm = commlib.attach(ddp, rule, min_size=0, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    norms, off, after = [], 0.0, 0.0
    for step in range(3):
        x, y = batch(world, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        decoded = torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None])
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        norms.append(norm)
        off = max(off, abs(float(norm / decoded.norm()) - 1))
        after = max(
            after, float(torch.cat([p.grad.reshape(-1) for p in ddp.parameters() if p.grad is not None]).norm())
        )
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    weights = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])
    found = {"norms": same_everywhere(world, torch.stack(norms)), "weights": same_everywhere(world, weights)}
    comm.close()
    return {**found, "off": off, "after": after, "norm": float(norms[0])}


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("rule", ["none", "onebit", "powersgd:rank=2", "factors"])
def test_the_norm_that_is_clipped_is_that_of_the_exchanged_gradient_on_every_rank(
    fleet: Fleet, rule: str, amp: bool
) -> None:
    for found in fleet.run(2, clipped, rule, amp):
        assert found["norms"]
        assert found["weights"]
        assert found["off"] < 1e-5
        assert found["norm"] > 0.1
        assert found["after"] < 0.1001
