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
from commlib.codecs.error_feedback import ErrorFeedback
from commlib.exchange.factors.tap import Tap
from commlib.groups.world import World
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.measurements import Measurements
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer, controlled, same_everywhere

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


def heads(route: str) -> contextlib.AbstractContextManager[list[ProvingHead]]:
    return controlled(lambda model: ProvingHead(model, route))


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


# -- verify: one layer in one of so many steps ----------------------------------------------------


def verified(world: World, route: str, fault: str, every: int) -> tuple[str, int]:
    """The error of a training whose rows of one layer have a fault, and the step before which it came."""
    with spoilt("2", fault):
        trainer = Trainer(world, {"*": route}, verify=every)
        try:
            trainer.train(40)
        except (commlib.WrongGradient, commlib.PeerLost) as e:
            return f"{type(e).__name__}: {e}", trainer.step
        finally:
            trainer.close()
    return "", 40


@pytest.mark.parametrize("route", ["factors", "owners"])
@pytest.mark.parametrize("fault", ["doubled", "changed in sign"])
def test_verify_finds_a_fault_and_names_layer_rank_and_values(fleet: Fleet, route: str, fault: str) -> None:
    found = fleet.run(2, verified, route, fault, 1)
    for rank, (said, step) in enumerate(found):
        assert said.startswith("WrongGradient: 2: on rank")
        assert f"on rank {rank}" in said
        assert "the mean of the true ones is" in said
        assert '{"2.*": "none"}' in said
        assert step < 40
    assert found[0][1] == found[1][1]  # all ranks draw the same layer


@pytest.mark.parametrize("every", [0, 1, 3])
def test_verify_changes_no_weight_where_nothing_is_wrong(fleet: Fleet, every: int) -> None:
    assert [said for said, _ in fleet.run(2, verified, "factors", "", every)] == ["", ""]
    assert all(fleet.run(2, as_ddp, every))


def as_ddp(world: World, every: int) -> bool:
    """Rows with verified steps in between train as plain DDP does, within rounding."""
    ours, plain = Trainer(world, "factors", verify=every), Trainer(world, None)
    for trainer in (ours, plain):
        trainer.train(6)
        trainer.close()
    return torch.allclose(ours.weights(), plain.weights(), rtol=1e-5, atol=1e-6)


def lossy(world: World, rule: str, leak: bool) -> str:
    """The error of a training by a codec, which drops a part of what it holds back if it shall leak."""
    original = ErrorFeedback.encode

    def encode(self: Any, x: Tensor, payload: Tensor, *, memory: Any, seed: int) -> None:
        original(self, x, payload, memory=memory, seed=seed)
        memory.new["residual"].mul_(0.5)

    if leak:
        ErrorFeedback.encode = encode  # type: ignore[method-assign]
    try:
        trainer = Trainer(world, rule, verify=1)
        try:
            trainer.train(12)
        except (commlib.WrongGradient, commlib.PeerLost) as e:
            return str(e)
        finally:
            trainer.close()
    finally:
        ErrorFeedback.encode = original  # type: ignore[method-assign]
    return ""


@pytest.mark.parametrize(
    "rule", ["onebit@gather", "topk:ratio=0.1@scatter_gather", "fp16@dense", "int8@gather", "topk:ratio=0.1,ef=0.9"]
)
def test_verify_holds_codecs_to_what_they_are_given(fleet: Fleet, rule: str) -> None:
    assert fleet.run(2, lossy, rule, False) == ["", ""]
    for said in fleet.run(2, lossy, rule, True):
        assert "has sent and kept" in said or "another rank has given up" in said
        assert '"none"' in said or "another rank" in said


def drawn(world: World, seed: int) -> list[str]:
    """Layers that are verified, step by step, in one of three steps."""
    trainer = Trainer(world, "onebit", verify=3, seed=seed)
    names = []
    for _ in range(12):
        names.append(trainer.comm._buckets.verified())
        trainer.train(1)
        trainer.comm._steps.settle()
    trainer.close()
    return names


def test_the_layer_is_drawn_by_lot_and_is_the_same_on_all_ranks(fleet: Fleet) -> None:
    first, second = fleet.run(2, drawn, 0)
    assert first == second
    assert [bool(name) for name in first] == [i % 3 == 2 for i in range(12)]
    assert first != fleet.run(2, drawn, 1)[0]
