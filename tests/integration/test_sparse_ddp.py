"""Sparse gradients under DDP: equal to plain DDP's, and beside dense layers by codecs; replicas the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.errors import CheckpointMismatch
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.thread_groups import counted
from tests.support.tiers import full, long
from tests.support.tiny_ddp import head, same_everywhere, through_delays

HEIGHT, WIDTH = 60, 16


class Words(nn.Module):
    """Two tables and two linear layers; one table is a bag."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.bag = nn.Embedding(HEIGHT, WIDTH, sparse=sparse), nn.EmbeddingBag(40, WIDTH, sparse=sparse)
        self.inner, self.outer = nn.Linear(WIDTH, 48), nn.Linear(48, 5)

    def forward(self, words: Tensor, use_bag: bool = True) -> Tensor:
        x = self.table(words).sum(1)
        if use_bag:
            x = x + self.bag(words.reshape(-1) % 40, torch.arange(len(words)) * words.shape[1])
        out: Tensor = self.outer(torch.tanh(self.inner(x)))
        return out


def words(world: World, step: int, kind: str = "others") -> Tensor:
    """(5, n) words of a rank in a step."""
    gen = torch.Generator().manual_seed(100 * step + world.rank)
    match kind:
        case "the same":
            return torch.arange(10).view(5, 2)
        case "duplicates":
            return torch.full((5, 4), world.rank)
        case "none on the last":
            return torch.randint(HEIGHT, (5, 3 if world.rank < world.size - 1 else 0), generator=gen)
        case "none":
            return torch.zeros(5, 0, dtype=torch.int64)
    return torch.randint(HEIGHT, (5, 3 + world.rank), generator=gen)


def optimizers(model: Any, name: str) -> list[torch.optim.Optimizer]:
    tables = [model.table.weight, model.bag.weight]
    others = [*model.inner.parameters(), *model.outer.parameters()]
    match name:
        case "SparseAdam":
            return [torch.optim.SparseAdam(tables, lr=0.01), torch.optim.Adam(others, lr=0.01)]
        case "Adagrad":
            return [torch.optim.Adagrad(model.parameters(), lr=0.05)]
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


class Run:
    """A model that trains on words."""

    def __init__(self, world: World, rule: Any, *, optimizer: str = "SGD", scaler: Any = None, **options: Any) -> None:
        self.world, self.scaler, self.step = world, scaler, 0
        wrap = {"bucket_cap_mb": 0.005, **options.pop("wrap", {})}
        self.ddp = DistributedDataParallel(Words(), **wrap)
        self.comm: Any = None
        if rule is not None:
            self.comm = commlib.attach(self.ddp, rule, **{"min_size": 0, "scaler": scaler, **options})
        self.optimizers = optimizers(self.ddp.module, optimizer)

    def train(self, steps: int, kind: str = "others", spoil: Callable[[Any], None] | None = None) -> bool:
        """Whether all gradients of the last step were finite."""
        finite = True
        for _ in range(steps):
            self.ddp.zero_grad()
            loss = self.ddp(words(self.world, self.step, kind)).square().mean()
            loss = loss if self.scaler is None else self.scaler.scale(loss)
            if spoil is not None:
                loss.register_hook(spoil)
            loss.backward()
            finite = all(bool(values(p.grad).isfinite().all()) for p in self.ddp.parameters() if p.grad is not None)
            for optimizer in self.optimizers:
                if self.scaler is not None:
                    self.scaler.step(optimizer)
                elif finite:
                    optimizer.step()
            if self.scaler is not None:
                self.scaler.update()
            self.step += 1
        return finite

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.ddp.parameters()])

    def grads(self) -> list[Tensor]:
        return [values(p.grad).clone() for p in self.ddp.parameters() if p.grad is not None]

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()


def values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


# -- equal to DDP -------------------------------------------------------------------------------

KINDS = ["others", "the same", "duplicates", "none on the last", "none"]


def beside_ddp(world: World, rule: str, optimizer: str, wrap: dict[str, Any]) -> list[tuple[bool, bool, bool]]:
    found = []
    for kind in KINDS:
        ours, plain = Run(world, rule, optimizer=optimizer, wrap=wrap), Run(world, None, optimizer=optimizer, wrap=wrap)
        for run in (ours, plain):
            run.train(4, kind)
        table: Any = ours.ddp.module.table
        found.append(
            (
                all(torch.equal(a, b) for a, b in zip(ours.grads(), plain.grads(), strict=True)),
                torch.equal(ours.weights(), plain.weights()) and same_everywhere(world, ours.weights()),
                bool(table.weight.grad.is_sparse),
            )
        )
        ours.close()
    return found


@pytest.mark.parametrize("size", [3, *full(2)])
@pytest.mark.parametrize(
    ("rule", "optimizer", "wrap"),
    [
        ("none", "SGD", {}),
        ("none", "Adagrad", {"gradient_as_bucket_view": True}),
        *full(("none", "SparseAdam", {}), ("none", "SGD", {"find_unused_parameters": True})),
    ],
)
def test_exact_equals_plain_ddp_bit_for_bit_whatever_rows_ranks_have(
    fleet: Fleet, size: int, rule: str, optimizer: str, wrap: dict[str, Any]
) -> None:
    assert fleet.run(size, beside_ddp, rule, optimizer, wrap) == [[(True, True, True)] * len(KINDS)] * size


def accumulated(world: World) -> bool:
    ours, plain = Run(world, "none"), Run(world, None)
    for run in (ours, plain):
        run.ddp.zero_grad()
        with run.ddp.no_sync():
            run.ddp(words(world, 0)).square().mean().backward()
        run.ddp(words(world, 1)).square().mean().backward()
    same = all(torch.equal(a, b) for a, b in zip(ours.grads(), plain.grads(), strict=True))
    ours.close()
    return same


def test_rows_of_several_backward_passes_add_up(fleet: Fleet) -> None:
    assert fleet.run(3, accumulated) == [True] * 3


# -- beside codecs ------------------------------------------------------------------------------

RULES: list[Any] = [
    "onebit",
    {"table.weight": "int8:ef=off", "*": "onebit"},
    {"table.weight": "qsgd", "bag.weight": "fp16:ef=off", "*": "topk:ratio=0.1"},
    {"table.weight": "natural", "inner.*": "factors", "*": "none"},
]


def beside_codecs(world: World, rule: Any) -> tuple[bool, bool, Tensor, Tensor]:
    ours, plain = Run(world, rule), Run(world, None)
    finite = ours.train(8)
    plain.train(8)
    tables: Any = ours.ddp.module
    others: Any = plain.ddp.module
    ours.close()
    return finite, same_everywhere(world, ours.weights()), tables.table.weight.detach(), others.table.weight.detach()


@pytest.mark.parametrize("size", [3, *full(2)])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_beside_dense_layers_by_codecs_replicas_are_the_same_and_go_about_where_ddp_does(
    fleet: Fleet, size: int, rule: Any
) -> None:
    for finite, same, ours, plain in fleet.run(size, beside_codecs, rule):
        assert finite
        assert same
        assert 0 < float((ours - plain).abs().max()) < 0.5


def by_auto(world: World) -> tuple[bool, bool, dict[str, str]]:
    with head(dense=2):
        ours, plain = Run(world, "auto"), Run(world, None)
        ours.train(6)
    plain.train(6)
    routes = {p.spec.name: str(p.route) for p in ours.comm.plan}
    close = torch.allclose(ours.weights(), plain.weights(), atol=1e-5)
    ours.close()
    return close, same_everywhere(world, ours.weights()), routes


def test_the_manager_chooses_among_the_other_layers(fleet: Fleet) -> None:
    for close, same, routes in fleet.run(2, by_auto):
        assert close
        assert same
        assert routes["table.weight"] == routes["bag.weight"] == "none@sparse"
        assert routes["inner.weight"] == "none@factors"


def live(world: World) -> tuple[bool, bool, bool]:
    """Swapped, and then detached."""
    ours, plain = Run(world, "onebit"), Run(world, None)
    ours.train(2)
    ours.comm.swap({"table.weight": "int8:ef=off", "*": "onebit"})
    ours.train(2)
    ours.comm.swap("none")
    ours.train(2)
    same = same_everywhere(world, ours.weights())
    ours.comm.detach()
    plain.train(6)
    with torch.no_grad():
        for p, q in zip(plain.ddp.parameters(), ours.ddp.parameters(), strict=True):
            p.copy_(q)
    for run in (ours, plain):
        run.train(2)
    equal = torch.equal(ours.weights(), plain.weights())
    return same, equal, same_everywhere(world, ours.weights())


@pytest.mark.parametrize("size", [2, 3])
def test_swapped_and_detached_a_model_with_tables_is_plain_ddp_bit_for_bit(fleet: Fleet, size: int) -> None:
    assert fleet.run(size, live) == [(True, True, True)] * size


def delayed(world: World, rule: Any, steps: int) -> tuple[bool, bool, bool]:
    unchanged, equal, naps = through_delays(lambda: Run(world, rule, wrap={"bucket_cap_mb": 0.001}), steps)
    return unchanged, equal, naps > 3 * steps  # in more than one bucket of each step


CODED = {"table.weight": "int8:ef=off", "inner.*": "onebit", "*": "powersgd:rank=2"}


@pytest.mark.parametrize(
    ("rule", "steps"), [(CODED, 10), *full((CODED, 60), ("none", 60)), *long((CODED, 200), ("none", 200))]
)
def test_random_delays_between_rounds_change_nothing(fleet: Fleet, rule: Any, steps: int) -> None:
    assert fleet.run(4, delayed, rule, steps) == [(True, True, True)] * 4


# -- what is not finite -------------------------------------------------------------------------


def spoilt(world: World, rule: Any) -> tuple[list[bool], bool, bool, int]:
    """One word of one rank has an infinite gradient in a step, which then never was."""
    weights, seen, skipped = [], [], 0
    for spoil in (True, False):
        run = Run(world, rule)
        run.train(3)
        if spoil:
            table: Any = run.ddp.module.table
            handle = None
            if world.rank == world.size - 1:
                handle = table.weight.register_hook(_with_inf)
            seen.append(run.train(1))
            if handle is not None:
                handle.remove()
        else:
            run.step += 1
        seen.append(run.train(3))
        weights.append(run.weights())
        skipped += run.comm.stats().skipped
        run.close()
    return seen, torch.equal(*weights), same_everywhere(world, weights[0]), skipped


def _with_inf(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad._values()[0, 0] = float("inf")
    return grad


@pytest.mark.parametrize("rule", ["onebit", {"table.weight": "int8:ef=off", "*": "onebit"}], ids=str)
def test_an_inf_in_one_ranks_rows_reaches_all_and_leaves_no_trace(fleet: Fleet, rule: Any) -> None:
    for seen, same, everywhere, skipped in fleet.run(3, spoilt, rule):
        assert seen == [False, True, True]
        assert same
        assert everywhere
        assert skipped == 1


def scaled(world: World, rule: Any) -> tuple[bool, bool, int, bool]:
    """With a GradScaler whose scale is too large at first."""
    runs = []
    for attached in (rule, None):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
        run = Run(world, attached, scaler=scaler, optimizer="SGD")
        run.train(12)
        runs.append(run)
    ours, plain = runs
    same = torch.equal(ours.weights(), plain.weights()) and ours.scaler.get_scale() == plain.scaler.get_scale()
    skipped, finite = ours.comm.stats().skipped, bool(ours.weights().isfinite().all())
    ours.close()
    return same, same_everywhere(world, ours.weights()), skipped, finite


@pytest.mark.parametrize("rule", ["none", "onebit"])
def test_under_a_grad_scaler_steps_are_skipped_as_by_plain_ddp(fleet: Fleet, rule: str) -> None:
    for same, everywhere, skipped, finite in fleet.run(2, scaled, rule):
        assert same is (rule == "none")
        assert everywhere
        assert (skipped > 0) is (rule == "onebit")  # by plain routes nobody needs to look
        assert finite


# -- bytes --------------------------------------------------------------------------------------


def sent(world: World) -> tuple[float, float, float, float, dict[str, int]]:
    run = Run(world, {"table.weight": "int8:ef=off", "*": "none"})
    run.train(2)  # DDP makes up its buckets meanwhile
    before = run.comm.stats()
    with counted(world) as bytes_:
        run.train(1)
    after = run.comm.stats()
    names = {n: x.wire_bytes - before.layers[n].wire_bytes for n, x in after.layers.items()}
    run.close()
    dense = sum(p.nbytes for p in run.ddp.parameters()) - (HEIGHT + 40) * WIDTH * 4
    return sum(bytes_), after.wire_bytes - before.wire_bytes, after.dense_bytes - before.dense_bytes, dense, names


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_those_of_the_formula_and_of_the_process_group(fleet: Fleet, size: int) -> None:
    worlds = [World(r, size) for r in range(size)]
    at = {
        "table": max(len(words(w, 2).unique()) for w in worlds),
        "bag": max(len((words(w, 2) % 40).unique()) for w in worlds),
    }

    def aligned(n: int) -> int:
        return -(-n // 8) * 8

    for counted_, accounted, plain, dense, names in fleet.run(size, sent):
        assert counted_ == pytest.approx(accounted, abs=1)
        bag = (size - 1) * (8 + aligned(4 * at["bag"]) + 4 * WIDTH * at["bag"])
        assert names["bag.weight"] == bag
        assert names["table.weight"] < (size - 1) * (8 + (8 + 4 * WIDTH) * at["table"]) / 2
        rows = sum((size - 1) * (8 + n * (8 + 4 * WIDTH)) for n in at.values())
        assert plain == pytest.approx(2 * (size - 1) / size * dense + rows, abs=2)


# -- what is refused ----------------------------------------------------------------------------


def refused(world: World) -> dict[str, str]:
    model = Words()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    tried: dict[str, Callable[[], object]] = {
        "ParameterServer": lambda: commlib.ParameterServer(model, sgd),
        "ShardedStep": lambda: commlib.ShardedStep(model, sgd),
        "LocalSteps": lambda: commlib.LocalSteps(model),
        "named": lambda: commlib.attach(DistributedDataParallel(Words()), {"table.weight": "onebit"}),
        "checkpoint": lambda: dense_checkpoint(world),
    }
    found = {}
    for name, call in tried.items():
        try:
            call()
        except (ValueError, CheckpointMismatch) as e:
            found[name] = f"{type(e).__name__}: {e}"
    return found


def dense_checkpoint(world: World) -> None:
    """Of the same model, but its tables were dense, and a codec held gradient of them back."""
    ddp = DistributedDataParallel(Words(sparse=False))
    comm = commlib.attach(ddp, "onebit", min_size=0)
    ddp(words(world, 0)).square().mean().backward()
    state = comm.state_dict()
    comm.close()
    run = Run(world, "onebit")
    try:
        run.comm.load_state_dict(state, drop_residuals=True)
        run.comm.load_state_dict(state)
    finally:
        run.close()


def test_what_does_not_carry_sparse_gradients_says_so(fleet: Fleet) -> None:
    for found in fleet.run(2, refused):
        for name, who in (
            ("ParameterServer", "a parameter server"),
            ("ShardedStep", "ShardedStep"),
            ("LocalSteps", "LocalSteps"),
        ):
            assert found[name].startswith("ValueError: table.weight is of an embedding with sparse=True, and " + who)
            assert "set sparse=False" in found[name]
        assert "cannot carry a sparse gradient: it keeps a memory of its layer" in found["named"]
        assert found["checkpoint"].startswith("CheckpointMismatch: the checkpoint holds back gradient of bag.weight")


def unused(world: World) -> tuple[str, str]:
    """DDP itself cannot do without a sparse gradient."""
    found = []
    for rule in ("none", None):
        run = Run(world, rule, wrap={"find_unused_parameters": True})
        run.train(1)
        run.ddp.zero_grad()
        try:
            run.ddp(words(world, 1), use_bag=False).square().mean().backward()
            found.append("")
        except RuntimeError as e:
            found.append(str(e))
        run.close()
    return found[0], found[1]


def test_a_table_that_a_step_does_not_use_is_ddps_error_with_commlib_as_without(fleet: Fleet) -> None:
    for ours, plain in fleet.run(2, unused):
        assert plain == "Expected sparse gradient to be defined."
        assert ours == plain
