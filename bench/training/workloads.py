"""Workload of a configuration in a trial: train a real model, or exchange the gradients of a simulated one.

What ``fully_shard`` is called on before the root: what communicates together under FSDP2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commlib
from commlib.bench.models.simulated import Replay
from commlib.fsdp.param_groups import is_sharded
from commlib.runtime.layers import linear_layers

from .correctness import Evidence
from .models import MODELS

LEAST = 10_000  # values: a smaller member of a sequence is left to the root, one message for each would cost more


def units(module: nn.Module) -> list[str]:
    """Names of the modules to shard by themselves: the large members of the outermost sequences, blocks or layers.

    What lies inside of one belongs to it; everything else (embeddings, norms, small layers) is the root's.
    """
    found = []
    for name, child in module.named_children():
        if isinstance(module, nn.Sequential | nn.ModuleList) and sum(p.numel() for p in child.parameters()) >= LEAST:
            found.append(name)
        else:
            found += [f"{name}.{inner}" for inner in units(child)]
    return found


def shard(module: nn.Module, group: Any) -> None:
    """``fully_shard`` on every unit, then on the root, over a process group. Collective.

    The parameters are others afterwards (DTensors): an optimizer has to be made anew.

    Args:
        module: the same on all ranks, with equal weights.
        group: whose ranks share the parameters out.

    Raises:
        ImportError: this PyTorch has no FSDP2.
    """
    from torch.distributed.device_mesh import DeviceMesh  # not before: FSDP2 takes a while to import
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, next(module.parameters()).device.type)
    for name in units(module):
        fully_shard(module.get_submodule(name), mesh=mesh)
    fully_shard(module, mesh=mesh)


_BATCHES = 4  # made before the clock starts, taken in turn
_HELD_OUT = 16  # examples that nobody trains on
_SAMPLE = 4096  # values of each parameter's gradient that are compared


class Workload(Protocol):
    """Model and steps of one trial; made anew for each, the same for every configuration."""

    @property
    def module(self) -> nn.Module:
        """Module that DDP wraps, or FSDP2 shards."""

    def place(self, which: Sequence[str], group: Any, timeout: float) -> None:
        """Have linear layers stay put, before DDP wraps the module (:func:`commlib.place`). Collective.

        Raises:
            ValueError: there are no activations.
        """

    def shard(self, group: Any) -> None:
        """Have the parameters shared out over a process group (:func:`shard`), before the first step. Collective.

        Raises:
            ValueError: there is no forward pass that they would have to come for.
        """

    def step(self, model: nn.Module) -> None:
        """Train one step, by what DDP has made of the module, or by the sharded module itself."""

    def look(self) -> None:
        """After each step, off the clock."""

    def restart(self) -> None:
        """As if no step had been made."""

    def evidence(self) -> Evidence:
        """After the last. Collective over the default group."""


class Training:
    """Real forward and backward passes, plain SGD.

    Args:
        model: a name of MODELS.
        batch: examples a step.
        device: where the model lives.
    """

    def __init__(self, model: str, batch: int, device: torch.device) -> None:
        task = MODELS[model]
        torch.manual_seed(0)
        self.module: nn.Module = task.module().to(device)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=task.lr)
        own = torch.Generator().manual_seed(1000 + dist.get_rank())
        self._batches = [_to(task.data(batch, own), device) for _ in range(_BATCHES)]
        self._held_out = _to(task.data(_HELD_OUT, torch.Generator().manual_seed(999)), device)
        self._steps, self._task = 0, task
        self._end_pass: Callable[[], None] = lambda: None
        self._first = self._loss()

    def place(self, which: Sequence[str], group: Any, timeout: float) -> None:
        """Same contract as :meth:`Workload.place`."""
        names = which[0] if tuple(which) == ("auto",) else which
        options: dict[str, Any] = {"process_group": group, "timeout": timeout, "init_sync": False}
        commlib.place(self.module, names, example=self._batches[0][0], **options)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=self._task.lr)

    def shard(self, group: Any) -> None:
        """Same contract as :meth:`Workload.shard`."""
        shard(self.module, group)
        sharded: Any = self.module
        self._end_pass = sharded.reshard  # FSDP2 keeps the root's parameters for a backward pass
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=self._task.lr)

    def step(self, model: nn.Module) -> None:
        """Same contract as :meth:`Workload.step`."""
        inputs, classes = self._batches[self._steps % _BATCHES]
        self._steps += 1
        self._optimizer.zero_grad()
        _cross_entropy(model(inputs), classes).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def look(self) -> None:
        """Same contract as :meth:`Workload.look`."""

    def restart(self) -> None:
        """Same contract as :meth:`Workload.restart`."""
        torch.manual_seed(0)
        _load(self.module, self._task.module().state_dict())
        self._steps = 0

    def evidence(self) -> Evidence:
        """The loss on the held-out examples, before and after."""
        losses = _gathered(torch.tensor([self._first, self._loss()], dtype=torch.float64))
        return Evidence(_apart(losses[:, 1:]), first=losses[:, 0].mean().item(), last=losses[:, 1].mean().item())

    def _loss(self) -> float:
        with torch.no_grad():
            inputs, classes = self._held_out
            loss: float = _cross_entropy(self.module(inputs), classes).item()  # collective if it is sharded
        self._end_pass()
        return loss


def _load(module: nn.Module, values: dict[str, Any]) -> None:
    """Set parameters and buffers, of a sharded module this rank's rows."""
    if not is_sharded(module):
        module.load_state_dict(values)
        return
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        own: Any = value.detach()
        if hasattr(value, "to_local"):  # over all ranks
            parts, rank = torch.chunk(values[name], dist.get_world_size()), dist.get_rank()
            own.to_local().copy_(parts[rank] if rank < len(parts) else values[name][:0])
        else:
            own.copy_(values[name])


class Replaying:
    """No arithmetic: the backward pass sleeps and hands out prepared gradients. No optimizer step.

    Args:
        model: a name of MODELS, for the shapes of its parameters.
        backward_s: length of the backward pass.
        device: where the gradients live.
        batch: examples a step: so many rows has a linear layer's gradient, times the positions of an example.
    """

    def __init__(self, model: str, backward_s: float, device: torch.device, batch: int) -> None:
        replay = Replay(shapes(model), backward_s=backward_s, rows=linear_rows(model, batch)).to(device)
        self.module: nn.Module = replay
        own = torch.cat([_sample(replay.gradient(name)) for name, _ in replay.named_parameters()])
        dist.all_reduce(own)
        self._mean = own / dist.get_world_size()
        self._sum = torch.zeros_like(self._mean)
        self._steps = 0
        self._off = 0.0

    def place(self, which: Sequence[str], group: Any, timeout: float) -> None:
        """Same contract as :meth:`Workload.place`."""
        raise ValueError("a simulated model has no activations, which placed layers send: use --compute real")

    def shard(self, group: Any) -> None:
        """Same contract as :meth:`Workload.shard`."""
        raise ValueError("a simulated model has no passes that sharded parameters come for: use --compute real")

    def step(self, model: nn.Module) -> None:
        """Same contract as :meth:`Workload.step`."""
        model.zero_grad()
        model().backward()

    def look(self) -> None:
        """Compares a part of every gradient with the mean it should be."""
        grads = [p.grad for _, p in self.module.named_parameters()]
        delivered = torch.cat([_sample(g) for g in grads if g is not None])
        self._sum += delivered
        self._steps += 1
        off = ((delivered - self._mean).norm() / self._mean.norm()).item()
        self._off = max(self._off, off) if off == off else off  # NaN stays

    def restart(self) -> None:
        """Same contract as :meth:`Workload.restart`."""
        self._sum.zero_()
        self._steps, self._off = 0, 0.0

    def evidence(self) -> Evidence:
        """How far what arrived was off, and how much of the mean it held."""
        share = (self._sum @ self._mean / (self._mean @ self._mean) / self._steps).item()
        seen = _gathered(torch.tensor([self._off, share], dtype=torch.float64))
        checked = _gathered(self._sum[:: max(1, len(self._sum) // 1024)].cpu().double())
        return Evidence(_apart(checked), off=seen[:, 0].max().item(), share=seen[:, 1].mean().item())


def shapes(model: str) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of a model's parameters; no memory is taken for them."""
    with torch.device("meta"):
        return [(n, tuple(p.shape)) for n, p in MODELS[model].module().named_parameters()]


def linear_rows(model: str, batch: int) -> dict[str, int]:
    """Linear layer → rows that pass through it in a step; no memory is taken for them."""
    with torch.device("meta"):
        module = MODELS[model].module()
    rows: dict[str, int] = {}
    for name, layer in linear_layers(module).items():
        layer.register_forward_hook(functools.partial(_count, rows, name))
    inputs, _ = MODELS[model].data(batch, torch.Generator().manual_seed(0))
    with torch.no_grad():
        module(inputs.to("meta"))
    return rows


def _count(rows: dict[str, int], name: str, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
    rows[name] = rows.get(name, 0) + output.numel() // output.shape[-1]


def _cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), classes.flatten())


def _to(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    return batch[0].to(device), batch[1].to(device)


def _sample(gradient: Tensor) -> Tensor:
    return gradient.detach().flatten()[:_SAMPLE]


def _gathered(mine: Tensor) -> Tensor:
    """(ranks, values) of every rank's values, which are on the CPU."""
    rows: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(rows, mine.tolist())
    return torch.tensor(rows, dtype=torch.float64)


def _apart(rows: Tensor) -> float:
    """Largest distance of a rank's values from rank 0's, relative to theirs; NaN if any is."""
    size = rows[0].norm()
    distance = (rows - rows[0]).norm(dim=1).max()
    return float(distance / size if size > 0 else distance)
