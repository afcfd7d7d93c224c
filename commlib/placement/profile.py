"""Profile that ``auto`` measures before it places anything: the link, one step of the model, products and updates."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from commlib.groups.world import World
from commlib.messaging.link_model import AlphaBeta, Link
from commlib.placement.choose import PlaceableLinear, PlacementMeasurements
from commlib.planning.manager.link_probe import LinkProbe, measure_product
from commlib.runtime.layers import trained_parameters


def measure(
    model: nn.Module, layers: Mapping[str, nn.Linear], example: Any, group: Any, world: World
) -> PlacementMeasurements:
    """The slowest rank's figures, on all ranks. Collective; some seconds on a slow link.

    Args:
        model: that is not placed yet. Its gradients, buffers and torch's random numbers are left as they were.
        layers: that may be placed.
        example: a tensor, or the arguments of a forward pass as a tuple.
        group: process group that carries nothing else.
        world: this rank.

    Raises:
        ValueError: nothing that comes out of the model needs a gradient.
    """
    inputs = example if isinstance(example, tuple) else (example,)
    device = next(iter(layers.values())).weight.device if layers else torch.device("cpu")
    link = LinkProbe(group, world, device).link()
    with _untouched(model):
        _Watch(model, layers).step(inputs)  # memory is new to the first
        watch = _Watch(model, layers)
        watch.step(inputs)
    own: list[float] = [watch.end, link.drag]
    own += [x for line in (link.all_reduce, link.all_gather) for x in (line.alpha, line.beta)]
    own += [watch.ready.get(unit, watch.end) for unit in watch.units]
    for name, x in layers.items():
        count, weight = watch.rows.get(name, 0), x.weight
        n, m = weight.shape
        products = [measure_product(n, m, k, weight.dtype, device) for k in (count, world.size * count)]
        needed = name in watch.input_grad
        works = [_work_s(weight, n, count, needed), _work_s(weight, -(-n // world.size), world.size * count, needed)]
        own += [count, needed, watch.seen.get(name, watch.end), *products, *works]
    worst = iter(_most(group, own, world, device))
    end, drag, *lines = (next(worst) for _ in range(6))
    units = {unit: (next(worst), nbytes) for unit, nbytes in watch.units.items()}
    found = {}
    for name, x in layers.items():
        rows, needs, *seconds = (next(worst) for _ in range(7))
        seen, local, rebuild, whole, part = seconds
        n, m, size = x.out_features, x.in_features, x.weight.element_size()
        found[name] = PlaceableLinear(n, m, int(rows), bool(needs), seen, local, rebuild, whole, part, size)
    return PlacementMeasurements(
        Link(world.size, AlphaBeta(*lines[:2]), AlphaBeta(*lines[2:]), drag), found, units, end
    )


class _Watch:
    """Watch over one step: when gradients are ready, and what passes through linear layers.

    Attributes:
        units: linear layer, or parameter that is of none of them → bytes of gradient.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
        self.rows: dict[str, int] = {}
        self.input_grad: set[str] = set()
        self.seen: dict[str, float] = {}
        self.ready: dict[str, float] = {}
        self.units: dict[str, int] = {}
        self.end = 0.0
        self._model, self._layers = model, layers
        of = {id(p): name for name, m in layers.items() for p in m.parameters()}
        self._unit = {n: of.get(id(p), n) for n, p in trained_parameters(model).items()}
        for name, p in trained_parameters(model).items():
            self.units[self._unit[name]] = self.units.get(self._unit[name], 0) + p.nbytes

    def step(self, inputs: tuple[Any, ...]) -> None:
        """A forward and a backward pass of the sum of all that comes out."""
        handles: list[Any] = [m.register_forward_hook(self._forward(name)) for name, m in self._layers.items()]
        for name, p in trained_parameters(self._model).items():
            parameter: Any = p
            handles.append(parameter.register_post_accumulate_grad_hook(self._noted(self.ready, self._unit[name])))
        try:
            self._began = time.perf_counter()
            outputs = [y for y in _tensors(self._model(*inputs)) if y.requires_grad]
            if not outputs:
                raise ValueError("example: nothing that comes out of the model needs a gradient")
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            self.end = time.perf_counter() - self._began
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self.rows[name] = self.rows.get(name, 0) + output.numel() // output.shape[-1]
            if inputs[0].requires_grad:
                self.input_grad.add(name)
            if output.requires_grad:
                output.register_hook(self._noted(self.seen, name))  # type: ignore[no-untyped-call]

        return hook

    def _noted(self, where: dict[str, float], name: str) -> Any:
        def hook(_: object) -> None:
            where[name] = time.perf_counter() - self._began

        return hook


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Leaves gradients, buffers and random numbers as they were."""
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    with torch.random.fork_rng(), torch.enable_grad():
        try:
            for p, _ in grads:
                p.grad = None
            yield
        finally:
            for p, grad in grads:
                p.grad = grad
            with torch.no_grad():
                for buffer, kept in buffers:
                    buffer.copy_(kept)


def _work_s(weight: Tensor, n: int, rows: int, input_grad: bool) -> float:
    """Seconds of a step with n outputs of a layer: its products, and the least that an optimizer does: w ← w + a·g.

    A gradient's memory is new in every step, as after ``zero_grad()``: a large one's costs as much as its product.
    """
    own = torch.zeros(n, weight.shape[1], dtype=weight.dtype, device=weight.device)
    x, grad = own.new_ones(rows, weight.shape[1]), own.new_ones(rows, n)
    times = []
    with torch.no_grad():
        for _ in range(4):
            began = time.perf_counter()
            functional.linear(x, own)
            if input_grad:
                grad @ own
            own.add_(grad.t() @ x, alpha=-1 / max(1, rows))
            times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _most(group: Any, own: list[float], world: World, device: torch.device) -> list[float]:
    """The largest of all ranks', each by itself."""
    mine = torch.tensor(own, dtype=torch.float64, device=device)
    out = mine.new_empty(world.size * len(own))
    group._allgather_base(out, mine).wait()
    found: list[float] = out.view(world.size, -1).amax(0).tolist()
    return found


def _tensors(what: Any) -> Iterator[Tensor]:
    if isinstance(what, Tensor):
        yield what
    elif isinstance(what, Mapping):
        yield from (t for value in what.values() for t in _tensors(value))
    elif isinstance(what, list | tuple):
        yield from (t for value in what for t in _tensors(value))
