"""Whole states of a model with placed layers, of an optimizer of it, and the norm of its gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from commlib.placement.communication import LayerCall
from commlib.placement.linear import PlacedLinear, placed_layers
from commlib.runtime.layers import inside


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state as a model without placed layers has it, on every rank; copies. Collective.

    Args:
        model: with placed layers, or DDP around it.

    Raises:
        PeerLost: a rank did not come.
    """
    module = inside(model)
    placed = placed_layers(module).items()
    parts = {f"{name}.{layer.part}": (f"{name}.weight", layer) for name, layer in placed}
    state: dict[str, Any] = {}
    for key, value in module.state_dict().items():
        if key in parts:
            whole, layer = parts[key]
            state[whole] = layer.whole_weight()
        else:
            state[key] = value.detach().clone() if isinstance(value, Tensor) else value
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Takes over a whole state, of any number of ranks: each rank cuts out its own rows. Nothing is sent.

    (``load_state_dict`` of the module does the same.)

    Raises:
        RuntimeError: it is of another model; as torch says it.
    """
    inside(model).load_state_dict(state)


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As an optimizer over the unplaced model has it, on every rank: what is shaped as a part of a weight is whole.

    Copies. Collective.

    Raises:
        PeerLost: a rank did not come.
    """
    state = copy.deepcopy(optimizer.state_dict())
    whole: dict[int, Any] = state["state"]
    for i, layer in _indices(model, optimizer):
        counts = tuple(c.stop - c.start for c in layer.cuts)
        for key in sorted(whole.get(i, {})):
            value = whole[i][key]
            if isinstance(value, Tensor) and value.shape == layer.weight.shape:
                whole[i][key] = layer.channel.gather(LayerCall(layer.name, counts, False, False), value)
    return state


def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Takes over a whole state, of any number of ranks. Nothing is sent.

    Raises:
        ValueError: it is of other parameters; as torch says it.
    """
    own: dict[int, Any] = {i: dict(values) for i, values in state["state"].items()}
    for i, layer in _indices(model, optimizer):
        for key, value in own.get(i, {}).items():
            if isinstance(value, Tensor) and tuple(value.shape) == (layer.out_features, layer.in_features):
                own[i][key] = value[layer.own].clone()
    optimizer.load_state_dict({**state, "state": own})


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_`` of the unplaced model, the same on all ranks. Collective.

    Torch's own would see a part of each placed weight, another on each rank, and replicas would part.

    Args:
        model: after the backward pass.
        max_norm: of all gradients, 2-norm.

    Returns:
        The norm before, float64.

    Raises:
        PeerLost: a rank did not come.
    """
    module = inside(model)
    layers = placed_layers(module)
    placed = {id(m.weight) for m in layers.values()}
    grads = [(id(p) in placed, p.grad) for p in module.parameters() if p.grad is not None]
    own, everyones = (sum(float(g.double().square().sum()) for put, g in grads if put is at) for at in (True, False))
    for layer in list(layers.values())[:1]:
        own = sum(layer.channel.numbers("sum up the norm of gradients", own, layer.weight.device))
    norm = torch.tensor(own + everyones, dtype=torch.float64).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, grad in grads:
        grad.mul_(scale.to(grad))
    return norm


def _indices(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, PlacedLinear]]:
    """(number in the optimizer's state, layer) of placed weights."""
    layers = {id(m.weight): m for m in placed_layers(inside(model)).values()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    yield from ((i, layers[id(p)]) for i, p in enumerate(parameters) if id(p) in layers)
