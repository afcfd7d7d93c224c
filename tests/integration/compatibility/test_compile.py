"""torch.compile and DDP, in all the orders in which people put them together: the same gradients and residuals."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange.registry import BY_ROWS
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full
from tests.support.tiny_ddp import batch, same_everywhere, torchrun

CODECS = ("onebit@gather", "onebit@scatter_gather", "powersgd:rank=2")
RULES = ("none", *CODECS, *BY_ROWS, "auto")
FORMS = ("compile(ddp)", "DDP(compile(model))", "model.compile() before DDP", "model.compile() after attach")
SPLIT, WHOLE = True, False  # torch._dynamo.config.optimize_ddp: graphs that end where buckets do, or not
STEPS = 3


class Net(nn.Module):
    """64 → 48 → 48 → 5, by a forward of its own: PyTorch compiles no ``Sequential`` that DDP calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1234)
        self.first, self.second, self.last = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return y


class Counting:
    """A backend of torch.compile that notes how many operations each graph has."""

    def __init__(self, backend: str = "eager") -> None:
        self.graphs: list[int] = []
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(sum(n.op.startswith("call") for n in graph.graph.nodes))
        return self._compile(graph, inputs)


@contextlib.contextmanager
def two_buckets() -> Iterator[None]:
    """DDP's, and with them graphs: the first may not be larger than the others, and usually has a megabyte."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 2048)
        yield


class Run:
    """A few steps of one model; what they left."""

    def __init__(
        self, rule: str | None, form: str | None, optimize: Any = SPLIT, backend: str = "eager", **options: Any
    ):
        torch._dynamo.reset()
        counters.clear()
        self.backend = Counting(backend)
        with torch._dynamo.config.patch(optimize_ddp=optimize):
            with two_buckets():
                self.net, self.ddp, self.call, self.comm = self._made(rule, form, options)
            self.grads = self.train(range(STEPS))
        self.breaks = sum(counters["graph_break"].values())

    def _made(self, rule: str | None, form: str | None, options: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
        net: Any = Net()
        if form == FORMS[2]:
            net.compile(backend=self.backend)
        inner = torch.compile(net, backend=self.backend) if form == FORMS[1] else net
        ddp = DistributedDataParallel(inner, bucket_cap_mb=0.01)
        comm = None if rule is None else commlib.attach(ddp, rule, min_size=0, **options)
        if form == FORMS[3]:
            net.compile(backend=self.backend)
        return net, ddp, torch.compile(ddp, backend=self.backend) if form == FORMS[0] else ddp, comm

    def train(self, steps: Any) -> Tensor:
        """Every gradient of these steps."""
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        found = []
        for step in steps:
            x, y = batch(World(dist.get_rank(), dist.get_world_size()), step)
            optimizer.zero_grad()
            with two_buckets():
                nn.functional.cross_entropy(self.call(x), y).backward()
            found.append(torch.cat([p.grad.reshape(-1).clone() for p in self.net.parameters()]))
            optimizer.step()
        return torch.stack(found)

    def close(self) -> list[Tensor]:
        """Ends it; its residuals."""
        if self.comm is None:
            return []
        state = tensors_of(self.comm.state_dict())
        self.comm.close()
        return state


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [t for key in sorted(state) for t in tensors_of(state[key])] if isinstance(state, dict) else []


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def compared(world: World, form: str, optimize: Any, rules: tuple[str, ...], backend: str) -> dict[str, dict[str, Any]]:
    """Rule → what the compiled run has that the eager one has not."""
    found = {}
    plain = Run(None, form, optimize, backend)
    for rule in rules:
        eager = Run(rule, None)
        run = Run(rule, form, optimize, backend)
        found[rule] = {
            "gradients": torch.equal(run.grads, eager.grads),
            "replicas": same_everywhere(world, run.grads),
            "steps": run.comm.stats().steps,
            "graphs": run.backend.graphs == plain.backend.graphs,
            "compiled": len(run.backend.graphs),
            "looks": len(run.ddp._forward_pre_hooks),
            "more breaks": run.breaks - plain.breaks,
            "residuals": same(run.close(), eager.close()),
        }
    return found


def check(found: dict[str, dict[str, Any]], form: str) -> None:
    for rule, run in found.items():
        assert run["gradients"], rule
        assert run["residuals"], rule
        assert run["replicas"], rule
        assert run["steps"] == STEPS
        assert run["compiled"] > 0
        if rule in BY_ROWS:
            assert run["more breaks"] >= 3, "a break at each layer whose rows are caught"
        else:
            assert run["graphs"], f"{rule}: the model is cut into other graphs than by plain DDP"
            assert run["looks"] <= {"none": 1, "auto": 2}.get(rule, 0)
            seen = run["looks"] if form == FORMS[0] else 0  # each in DDP's __call__, before any graph
            assert run["more breaks"] <= seen + bool(seen), rule


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_a_compiled_model_has_the_gradients_and_residuals_of_the_eager_one(fleet: Fleet, form: str) -> None:
    for found in fleet.run(2, compared, form, SPLIT, RULES, "eager"):
        check(found, form)


@pytest.mark.full
@pytest.mark.parametrize("form", [FORMS[0], *full(FORMS[1])])
def test_so_has_one_whose_backward_pass_is_a_graph_too(fleet: Fleet, form: str) -> None:
    for found in fleet.run(2, compared, form, WHOLE, ("onebit@gather", "factors"), "aot_eager"):
        check(found, form)


def under_a_hierarchy(world: World) -> bool:
    with torchrun(world, 2):
        runs = [Run("onebit", form, hierarchy=True) for form in (None, FORMS[0])]
    states = [run.close() for run in runs]
    return torch.equal(runs[0].grads, runs[1].grads) and same(*states) and same_everywhere(world, runs[1].grads)


@pytest.mark.full
def test_so_has_one_under_a_hierarchy(fleet: Fleet) -> None:
    assert fleet.run(4, under_a_hierarchy) == [True] * 4


def again_and_again(world: World, rule: str) -> tuple[int, int]:
    run = Run(rule, FORMS[0])
    first = counters["frames"]["total"]
    run.train(range(12))
    run.close()
    return first, counters["frames"]["total"]


@pytest.mark.parametrize("rule", ["onebit@gather", *full("factors", "auto")])
def test_later_steps_compile_nothing(fleet: Fleet, rule: str) -> None:
    for first, later in fleet.run(2, again_and_again, rule):
        assert first == later > 0


def whole_step(world: World, rule: str) -> tuple[bool, bool, int]:
    runs = [Run(rule, None), Run(rule, None)]

    def step(ddp: nn.Module, x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(ddp(x), y).backward()

    grads = []
    for run, call in zip(runs, (torch.compile(step, backend="eager"), step), strict=True):
        run.net.zero_grad()
        for number in range(3):  # gradients add up
            with two_buckets():
                call(run.ddp, *batch(world, number))
        grads.append(torch.cat([p.grad.reshape(-1) for p in run.net.parameters()]))
    steps = runs[0].comm.stats().steps
    return torch.equal(*grads), same(*(run.close() for run in runs)), steps - STEPS


@pytest.mark.parametrize("rule", ["onebit@gather", *full("none", "factors", "auto")])
def test_a_step_compiled_as_a_whole_is_that_of_the_eager_one(fleet: Fleet, rule: str) -> None:
    assert fleet.run(2, whole_step, rule) == [(True, True, 3)] * 2


# -- torch._dynamo.config.optimize_ddp -----------------------------------------------------------

MODES = ("ddp_optimizer", "python_reducer_without_compiled_forward", "no_optimization")


def modes(world: World, mode: str, when: str) -> bool:
    eager = Run("onebit@gather", None)
    run = Run("onebit@gather", FORMS[0], mode if when == "before" else SPLIT)
    with torch._dynamo.config.patch(optimize_ddp=mode):
        more = run.train(range(2))
    expected = eager.train(range(2))
    return torch.equal(run.grads, eager.grads) and torch.equal(more, expected) and same(run.close(), eager.close())


@pytest.mark.parametrize(("mode", "when"), [*((m, "before") for m in MODES), ("python_reducer", "after attach")])
def test_the_hook_is_called_however_dynamo_cuts_the_graph(fleet: Fleet, mode: str, when: str) -> None:
    assert fleet.run(2, modes, mode, when) == [True] * 2


def python_reducer(world: World) -> list[str]:
    said = []
    for make in (commlib.attach, commlib.HookState):
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            ddp = DistributedDataParallel(Net())
        with pytest.raises(ValueError, match="python_reducer") as caught:
            make(ddp, "onebit")
        said.append(str(caught.value))
    return said


def test_a_model_for_the_python_reducer_is_refused_by_name(fleet: Fleet) -> None:
    for said in fleet.run(2, python_reducer):
        assert all("make it with another value" in s for s in said)


def compiled_autograd(world: World, rule: str | None) -> str:
    run = Run(rule, None)
    said = "no error"
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        try:
            run.train(range(1))
        except RuntimeError as e:
            said = str(e)
    run.close()
    return said


def test_compiled_autograd_is_refused_by_ddp_itself(fleet: Fleet) -> None:
    for rule in (None, "onebit@gather"):
        for said in fleet.run(2, compiled_autograd, rule):
            assert "Compiled autograd is not compatible with C++ DDP Reducer" in said


# -- asked for one graph --------------------------------------------------------------------------


def full_graph(world: World, rule: str) -> str:
    torch._dynamo.reset()
    net = Net()
    ddp = DistributedDataParallel(torch.compile(net, backend="eager", fullgraph=True))
    comm = commlib.attach(ddp, rule, min_size=0)
    try:
        ddp(batch(world, 0)[0]).sum().backward()
    except torch._dynamo.exc.Unsupported as e:
        return str(e)
    finally:
        comm.close()
    return "one graph"


@pytest.mark.parametrize("rule", RULES)
def test_who_asks_for_one_graph_gets_it_or_hears_which_route_has_a_break(fleet: Fleet, rule: str) -> None:
    for said in fleet.run(2, full_graph, rule):
        assert "commlib catches this layer's rows in Python" in said if rule in BY_ROWS else said == "one graph"


# -- inductor -------------------------------------------------------------------------------------


def inductor(world: World) -> tuple[float, bool]:
    with torch._inductor.config.patch(compile_threads=1):
        run, eager = Run("onebit@gather", FORMS[0], WHOLE, "inductor"), Run("onebit@gather", None)
    off = float((run.grads[0] - eager.grads[0]).abs().max() / eager.grads[0].abs().max())
    run.close()
    eager.close()
    return off, same_everywhere(world, run.grads)


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler: CXX, g++"
)
def test_by_inductor_replicas_are_equal_and_gradients_are_the_eager_ones_up_to_its_rounding(fleet: Fleet) -> None:
    for off, equal in fleet.run(2, inductor):
        assert equal
        assert off < 1e-5
