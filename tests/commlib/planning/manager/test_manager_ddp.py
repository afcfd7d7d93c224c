"""``commlib.attach(ddp)``: the manager on real ranks: settles, changes routes between steps only, never hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from commlib.planning.manager import manager
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.measurements import Measurements
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import Logged, heard, same_everywhere, say

BOUND = 2e-6


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 5))


def batch(world: World, step: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + world.rank))


class Script:
    """A head that lets all linear layers go by factors and back, step by step."""

    def __init__(self, model: Any) -> None:
        self.layers = [u.name for u in model.units.values() if u.shape is not None][::-1]
        self.on = False
        self.seen: list[Measurements] = []

    def first(self) -> Decision:
        return Decision(steps=2, probe=False)

    def review(self, f: Measurements) -> Decision:
        self.on = not self.on
        self.seen.append(f)
        routes = dict.fromkeys(self.layers, "factors") if self.on else {}
        return Decision(routes, dict.fromkeys(routes, 8), steps=2, skip=0, probe=False, phase="trial")


class Clumsy(Script):
    """A head with a bug."""

    def review(self, f: Measurements) -> Decision:
        raise ZeroDivisionError("a bug")


def train(world: World, rule: Any, steps: int, head: Any = None, **options: Any) -> tuple[Tensor, Any]:
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    original = vars(manager)["Controller"]
    vars(manager)["Controller"] = head or original
    comm = None if rule is None else commlib.attach(ddp, rule, **options)
    vars(manager)["Controller"] = original
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        if step % 5 == 3:
            with ddp.no_sync():
                ddp(batch(world, 1000 + step)).square().mean().backward()
        ddp(batch(world, step)).square().mean().backward()
        optimizer.step()
    if comm is not None:
        comm.close()
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]), comm


def by_default(world: World) -> tuple[bool, float, bool, str, float | None]:
    ours, comm = train(world, commlib.Exact(), 60)
    ddps, _ = train(world, None, 60)
    off = float((ours - ddps).abs().max() / ddps.abs().max())
    return same_everywhere(world, ours), off, comm.settled, str(comm.plan), comm.predicted_s


def test_by_default_it_measures_settles_and_trains_as_ddp_does(fleet: Fleet) -> None:
    for same, off, _, plan, predicted in fleet.run(3, by_default):
        assert same
        assert off < 1e-4  # sixty steps, each in another order of summation
        assert plan.startswith("exact routes, chosen by measurement")
        assert "measured ms" in plan
        assert predicted is not None
        assert predicted > 0


def scripted(world: World) -> tuple[bool, float, list[int], int]:
    seen: list[Any] = []

    class Kept(Script):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            seen.append(self)

    ours, comm = train(world, "auto", 25, Kept)
    ddps, _ = train(world, None, 25)
    off = float((ours - ddps).abs().max() / ddps.abs().max())
    rows = sorted({n for f in seen[0].seen for n in f.rows.values()})
    by_rows = sum(p.route.exchange == "factors" for p in comm.plan)
    return same_everywhere(world, ours), off, rows, by_rows


def test_routes_change_between_steps_on_all_ranks_at_once_and_rows_are_counted_over_accumulation(fleet: Fleet) -> None:
    for rank, (same, off, rows, by_rows) in enumerate(fleet.run(3, scripted)):
        assert same
        assert off < 1e-4
        assert by_rows in (0, 4)  # the last layer has too few values
        if rank == 0:
            assert rows == [8, 16]


def joining(world: World) -> bool:
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    original, vars(manager)["Controller"] = vars(manager)["Controller"], Script
    comm = commlib.attach(ddp)
    vars(manager)["Controller"] = original
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp]):
        for step in range(9 + 4 * ((world.rank + 1) % world.size)):  # rank 0 joins before rank 1, rank 2 first of all
            optimizer.zero_grad()
            ddp(batch(world, step)).square().mean().backward()
            optimizer.step()
    comm.close()
    return same_everywhere(world, torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]))


def test_ranks_that_have_joined_come_to_the_reviews_too(fleet: Fleet) -> None:
    assert fleet.run(3, joining) == [True] * 3


def clumsy(world: World) -> tuple[bool, str, list[str]]:
    with Logged() as said:
        ours, comm = train(world, "auto", 8, Clumsy)
    ddps, _ = train(world, None, 8)
    return torch.equal(ours, ddps), comm._manager.decision.phase, said


def test_a_bug_in_the_head_leaves_everything_dense_and_is_logged(fleet: Fleet) -> None:
    for rank, (equal, phase, said) in enumerate(fleet.run(2, clumsy)):
        assert equal
        assert phase == "failed"
        if rank == 0:
            assert "all layers are dense" in said[0]


def cannot(*_: Any) -> Any:
    raise FloatingPointError("cannot measure")


def blind(world: World) -> tuple[bool, str, str, bool]:
    """Rank 1 alone cannot measure."""
    original = vars(manager)["measure_product"]
    if world.rank == 1:
        vars(manager)["measure_product"] = cannot
    try:
        with Logged() as said:
            ours, comm = train(world, "auto", 8)
    finally:
        vars(manager)["measure_product"] = original
    ddps, _ = train(world, None, 8)
    logged = any("rank 1 cannot measure" in line for line in said)
    return torch.equal(ours, ddps), comm._manager.decision.phase, str(comm.plan), logged


def test_a_rank_that_cannot_measure_leaves_all_layers_dense_on_all_ranks(fleet: Fleet) -> None:
    for rank, (equal, phase, plan, logged) in enumerate(fleet.run(2, blind)):
        assert equal
        assert phase == "failed"
        assert "measuring has failed" in plan
        assert logged == (rank == 1)


def unlike(world: World) -> tuple[set[str], bool, float]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + world.rank)
    try:
        ours, comm = train(world, "auto", 40)
        ddps, _ = train(world, None, 40)
    finally:
        torch.set_num_threads(threads)
    off = float((ours - ddps).abs().max() / ddps.abs().max())
    return {p.route.exchange for p in comm.plan}, same_everywhere(world, ours), off


def test_ranks_that_would_multiply_differently_never_multiply_the_same_rows(fleet: Fleet) -> None:
    for exchanges, same, off in fleet.run(2, unlike):
        assert exchanges <= {"dense", "owners"}
        assert same
        assert off < 1e-4


def without(world: World, how: str) -> tuple[str, bool]:
    model: nn.Module = net()
    if how == "compiled":
        model[0] = torch.compile(model[0])  # type: ignore[index,operator]
    if how == "no layer":
        model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten())
    ddp = DistributedDataParallel(model)
    comm = commlib.HookState(ddp.module) if how == "inside" else commlib.attach(ddp)
    plain = all(type(m) is nn.Linear for m in model.modules() if isinstance(m, nn.Linear))
    comm.close()
    return str(comm.plan), comm.settled and plain


@pytest.mark.parametrize(
    ("size", "how", "words"),
    [
        (1, "alone", "one rank only"),
        *full((2, "compiled", "compiled")),
        (2, "no layer", "no other exact route"),
        (2, "inside", "whose passes nobody sees"),
    ],
)
def test_where_there_is_no_choice_layers_are_untouched_and_the_plan_says_why(
    fleet: Fleet, size: int, how: str, words: str
) -> None:
    for plan, untouched in fleet.run(size, without, how):
        assert words in plan
        assert untouched


def stays_away(self: Any) -> bool:
    self._left -= 1
    if self._left > 0:
        return False
    heard("rank 0 has given up")
    raise RuntimeError("I was away")


def absent(world: World) -> str:
    """Rank 1 does not come to the first review."""
    if world.rank == 1:
        vars(manager)["Manager"].exchanged = stays_away
    try:
        train(world, "auto", 3, Script, timeout=10)
    except (commlib.PeerLost, RuntimeError) as e:
        if world.rank == 0:
            say("rank 0 has given up")
        return str(e)
    return "no error"


def test_a_rank_that_does_not_come_to_a_review_is_named() -> None:
    own = Fleet()
    try:
        said = own.run(2, absent)
    finally:
        own.close()
    assert "no figures of rank 1 within 10 s" in said[0]
