"""What people have reported of DDP, FSDP2, torch.compile and Lightning, each beside commlib: docs/reports.md."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from tests.integration.test_unusual_models import STEPS, gradients, off, table
from tests.support import unusual_models
from tests.support.public_reports import CASES, FRAMEWORKS, REPORTS, page
from tests.support.rank_pool import Fleet
from tests.support.reported_models import Parts, chain, mean
from tests.support.tiers import full
from tests.support.tiny_ddp import head, same_everywhere
from tests.support.unusual_modules import WIDTH

PAGE = Path(__file__).parents[2] / "docs" / "reports.md"
RAISING = [r.thread for r in REPORTS if r.raises]
TRAINED = [thread for thread in CASES if thread not in RAISING]
PARTS = [TRAINED[i::4] for i in range(4)]
RULES = ["none", "auto", "factors", *full("owners")]


def batch(world: World, step: int) -> Tensor:
    """(6, 8) inputs; different on every rank and at every step."""
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + world.rank))


# -- the table -----------------------------------------------------------------------------------


def tried(world: World, rule: str, threads: list[str]) -> dict[str, str]:
    """Reports of the table that do not end right → what was wrong."""
    with patch.dict(unusual_models.CASES, CASES):
        return table(world, rule, threads)


@pytest.mark.parametrize("size", [2, *full(3)])
@pytest.mark.parametrize("threads", PARTS, ids=range(len(PARTS)))
@pytest.mark.parametrize("rule", RULES)
def test_exact_routes_have_ddps_gradients(fleet: Fleet, rule: str, threads: list[str], size: int) -> None:
    for wrong in fleet.run(size, tried, rule, threads):
        assert not wrong, "\n".join(f"{thread}: {what}" for thread, what in wrong.items())


@pytest.mark.parametrize("threads", PARTS, ids=range(len(PARTS)))
@pytest.mark.parametrize("rule", ["onebit", *full("topk:ratio=0.5", "powersgd:rank=1", "int8")])
def test_codecs_train_them_and_ranks_stay_equal(fleet: Fleet, rule: str, threads: list[str]) -> None:
    for wrong in fleet.run(2, tried, rule, threads):
        assert not wrong, "\n".join(f"{thread}: {what}" for thread, what in wrong.items())


def errors(world: World, rule: str | None) -> dict[str, str]:
    """What each report of an error raises with this route; None: with plain DDP."""
    found = {}
    for thread in RAISING:
        case = CASES[thread]
        torch.manual_seed(7)
        with head(1) if rule == "auto" else contextlib.nullcontext():
            ddp = DistributedDataParallel(case.model(), bucket_cap_mb=0.0003, **case.ddp)
            comm: Any = None if rule is None else commlib.attach(ddp, rule, min_size=0)
            kept = case.before(ddp)
            try:
                for step in range(STEPS):
                    ddp.zero_grad()
                    case.step(ddp, batch(world, step), world.rank)
                found[thread] = "nothing"
            except Exception as e:
                found[thread] = f"{type(e).__name__}: {e}"
            if comm is not None:
                comm.close()
            del kept
    return found


@pytest.mark.parametrize("rule", [None, "none", "auto", "factors", "onebit", *full("owners", "int8")])
def test_where_ddp_raises_an_error_it_is_the_same_one_and_no_rank_hangs(fleet: Fleet, rule: str | None) -> None:
    for found in fleet.run(2, errors, rule, deadline=60):
        for report in REPORTS:
            if report.raises:
                assert found[report.thread].startswith(f"RuntimeError: {report.raises}"), report.title


def without_rows(world: World, threads: list[str]) -> list[str]:
    """Reports of which no layer's rows are exchanged at the end, with the default choice."""
    with patch.dict(unusual_models.CASES, CASES):
        plans = {thread: gradients(world, thread, "auto")[2] for thread in threads}
    return [thread for thread, plan in plans.items() if not any("@factors" in route for route in plan.values())]


@pytest.mark.full
def test_the_default_has_chosen_rows_in_most_of_them(fleet: Fleet) -> None:
    without, *_ = fleet.run(2, without_rows, TRAINED)
    assert len(without) < len(TRAINED) / 4, without


# -- FSDP2 -----------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer, and beside it two thin ones that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.base(x) + self.up(self.down(x)))
        return y


def sharded(kind: str) -> nn.Module:
    """A model of one of the three reports, after fully_shard."""
    torch.manual_seed(7)
    model: nn.Module
    if kind == "adapters":
        model = nn.Sequential(Adapted(), Adapted())
        for block in model:
            fully_shard(block)
    elif kind == "a submodule of two":
        common = nn.Linear(WIDTH, WIDTH)
        first, second = (Parts(chain, a=lambda: common, c=lambda: None) for _ in range(2))
        model = nn.Sequential(first, second)
        fully_shard([first, second])
    else:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        fully_shard(model[0])
    fully_shard(model)
    return model


def of_shards(world: World, kind: str, rule: str | None) -> list[list[Tensor | None]]:
    """This rank's shards of all gradients after each step, of FSDP2 with commlib, or without."""
    model: Any = sharded(kind)
    comm: Any = None if rule is None else commlib.attach(model, rule, min_size=0)
    found = []
    for step in range(STEPS):
        model.zero_grad()
        for part in range(3 if kind == "accumulation" else 1):
            if kind == "accumulation":
                model.set_requires_gradient_sync(part == 2)
            mean(model(batch(world, 10 * step + part))).backward()
        found.append([None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()])
    if comm is not None:
        comm.close()
    return found


def compared(world: World, kind: str) -> dict[str, float]:
    """How far FSDP2's gradients are from those with each route."""
    plain = of_shards(world, kind, None)
    return {rule: off(of_shards(world, kind, rule), plain) for rule in ("none", "int8")}


@pytest.mark.parametrize("kind", ["accumulation", "adapters", "a submodule of two"])
def test_fsdp2_trains_as_without(fleet: Fleet, kind: str) -> None:
    for found in fleet.run(2, compared, kind):
        assert found["none"] == 0
        assert 0 < found["int8"] < 0.05


# -- torch.compile and Lightning -------------------------------------------------------------------


def compiled(world: World, rule: str | None) -> tuple[list[Tensor], bool]:
    """Gradients of a compiled DDP model with checkpoints, and whether all ranks have the same."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    module = Parts(chain, c=lambda: None)
    for name in "ab":
        setattr(module, name, checkpoint_wrapper(getattr(module, name)))
    ddp = DistributedDataParallel(module)
    comm: Any = None if rule is None else commlib.attach(ddp, rule, min_size=0)
    model = torch.compile(ddp, backend="aot_eager")
    found = []
    for step in range(STEPS):
        ddp.zero_grad()
        mean(model(batch(world, step))).backward()
        found += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
    if comm is not None:
        comm.close()
    return found, same_everywhere(world, torch.cat([g.reshape(-1) for g in found]))


def all_compiled(world: World) -> dict[str, bool]:
    plain, _ = compiled(world, None)
    same, alike = compiled(world, "none")
    coded, alike_too = compiled(world, "onebit")
    equal = len(same) == len(plain) and all(map(torch.equal, same, plain))
    return {"gradients": equal, "replicas": alike and alike_too, "as many": len(coded) == len(plain) == 4 * STEPS}


@pytest.mark.full
def test_a_compiled_model_with_checkpoints_trains_as_without(fleet: Fleet) -> None:
    for found in fleet.run(2, all_compiled):
        assert all(found.values()), found


def adversarial(world: World) -> dict[str, bool]:
    """A GAN in Lightning's own loop: with plain DDP, with commlib that leaves gradients as they are, with a codec."""
    from lightning.pytorch.strategies import DDPStrategy as PlainStrategy

    from commlib.integrations.lightning import DDPStrategy
    from tests.commlib.integrations.lightning_jobs import Toy, fit, flat

    class Gan(Toy):
        """A generator and a discriminator, which are trained by turns."""

        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__(world)
            torch.manual_seed(7)
            self.net = nn.Linear(WIDTH, WIDTH)
            self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

        def training_step(self, which: Tensor, index: int) -> None:
            optimizers: Any = self.optimizers()
            maker, judge = optimizers
            x = batch(world, self.trainer.global_step)
            for optimizer, loss in (
                (maker, lambda: -self.judge(self.net(x)).mean()),
                (judge, lambda: self.judge(self.net(x).detach()).mean() - self.judge(x).mean()),
            ):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss())
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net, self.judge)]

    options: Any = {"find_unused_parameters": True}
    plain = flat(fit(world, PlainStrategy(**options), Gan(), max_epochs=1))
    same = flat(fit(world, DDPStrategy("none", min_size=0, **options), Gan(), max_epochs=1))
    rows = flat(fit(world, DDPStrategy("factors", min_size=0, **options), Gan(), max_epochs=1))
    coded = flat(fit(world, DDPStrategy("onebit", min_size=0, **options), Gan(), max_epochs=1))
    gc.collect()  # before the process group, on which DDP models must not be left
    return {
        "weights": torch.equal(plain, same),
        "by rows": torch.allclose(plain, rows, rtol=1e-5, atol=1e-7),
        "other weights": not torch.equal(plain, coded),
        "replicas": all(same_everywhere(world, w) for w in (plain, same, rows, coded)),
    }


@pytest.mark.full
def test_a_gan_of_lightning_trains_as_without(fleet: Fleet) -> None:
    for found in fleet.run(2, adversarial):
        assert all(found.values()), found


# -- the page ---------------------------------------------------------------------------------------


@pytest.mark.checkout
def test_the_page_has_the_table() -> None:
    assert PAGE.read_text().endswith("\n" + page()), "python -m tests.support.public_reports prints the table"


def test_every_thread_is_there_once_and_has_a_test() -> None:
    reports = [*REPORTS, *FRAMEWORKS]
    assert len({r.thread for r in reports}) == len(reports) >= 30
    assert all(r.case is not None or r.test in globals() for r in reports)
