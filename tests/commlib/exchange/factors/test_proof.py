"""Before rows replace a layer's gradient they are compared with it, in a step that is exchanged both ways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange.factors.tap import Tap
from commlib.groups.world import World
from commlib.planning.manager import manager
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.measurements import Measurements
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer, same_everywhere

Rows = tuple[Tensor, Tensor]
FAULTS: dict[str, Callable[[list[Rows]], list[Rows]]] = {
    "doubled": lambda rows: [*rows, *rows],
    "of the step before": lambda rows: [(u.roll(1, 0), v) for u, v in rows],
    "lost": lambda rows: [(u[1:], v[1:]) for u, v in rows],
    "changed in sign": lambda rows: [(u, -v) for u, v in rows],
}


class ProvingHead:
    """Dense for a step, a step of proof, and then what was proved."""

    def __init__(self, model: Any, route: str) -> None:
        self.layers = [u.name for u in model.units.values() if u.shape is not None][::-1]
        self.route, self.seen = route, dict[str, float]()
        self.turn = 0

    def first(self) -> Decision:
        return Decision(steps=1, probe=False, skip=0)

    def review(self, f: Measurements) -> Decision:
        self.turn += 1
        routes = dict.fromkeys(self.layers, self.route)
        if self.turn == 1:
            return Decision(routes, dict.fromkeys(routes, 8), steps=1, probe=False, phase="proof")
        self.seen = dict(f.differs)
        return Decision(steps=1000, probe=False, phase="steady")


@contextlib.contextmanager
def heads(route: str) -> Iterator[list[ProvingHead]]:
    made: list[ProvingHead] = []

    def make(model: Any) -> ProvingHead:
        made.append(ProvingHead(model, route))
        return made[-1]

    original, vars(manager)["Controller"] = vars(manager)["Controller"], make
    try:
        yield made
    finally:
        vars(manager)["Controller"] = original


@contextlib.contextmanager
def spoilt(layer: str, fault: str) -> Iterator[None]:
    """Rows of one layer leave its tap with a fault."""
    original = Tap.take

    def take(self: Tap) -> list[Rows]:
        rows = original(self)
        return FAULTS[fault](rows) if self.name == layer and fault else rows

    Tap.take = take  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tap.take = original  # type: ignore[method-assign]


def proved(world: World, route: str, fault: str) -> tuple[dict[str, float], bool, bool]:
    """What rank 0 learnt in the proof; whether gradients of that step are plain DDP's to the last bit, and equal."""
    with heads(route) as made, spoilt("2", fault):
        ours, plain = Trainer(world, "auto"), Trainer(world, None)
        for trainer in (ours, plain):
            trainer.train(2)
        exact = torch.equal(ours.weights(), plain.weights())
        ours.train(1)
        equal = same_everywhere(world, ours.weights())
        seen = made[0].seen if world.rank == 0 else {}
        ours.close()
    return seen, exact, equal


@pytest.mark.parametrize("route", ["factors", "owners"])
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_fault_in_what_is_caught_is_found_and_harms_nothing(fleet: Fleet, route: str, fault: str) -> None:
    (seen, *rest), *others = fleet.run(2, proved, route, fault)
    assert set(seen) == {"0", "2", "4"}
    assert seen["0"] <= 1
    assert seen["4"] <= 1
    assert (0 <= seen["2"] <= 1) == (not fault), seen
    assert all(rest)
    assert all(all(r) for _, *r in others)


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.odd = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.odd(torch.tanh(self.plain(x)))
        return y


def foreign(world: World, accumulate: bool) -> dict[str, float]:
    """The proof of a layer that has a penalty, and of one that has not; perhaps with accumulation."""
    with heads("factors") as made:
        ddp = DistributedDataParallel(Penalised(), bucket_cap_mb=0.0002)
        comm = commlib.attach(ddp, "auto", min_size=0)
        for step in range(3):
            ddp.zero_grad()
            x = torch.randn(6, 64, generator=torch.Generator().manual_seed(10 * step + world.rank))
            if accumulate:
                with ddp.no_sync():
                    ddp(x + 1).square().mean().backward()
            (ddp(x).square().mean() + 1e-3 * ddp.module.odd.weight.square().sum()).backward()
        comm.close()
    return made[0].seen if world.rank == 0 else {}


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_layer_with_gradient_besides_its_rows_is_not_proved(fleet: Fleet, accumulate: bool) -> None:
    seen, _ = fleet.run(2, foreign, accumulate)
    assert 0 <= seen["plain"] <= 1
    assert seen["odd"] < 0
