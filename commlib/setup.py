"""What attaching works out from a model and what the user has asked for, before anything is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.groups import waits_on_stream
from commlib.layer import LayerSpec
from commlib.model import check_frozen_integers, inside, layer_specs, linear_layers, one_device
from commlib.plan_file import pin
from commlib.policy import Policy, policy_of
from commlib.route import Plan, Rules, make_plan


@dataclasses.dataclass(frozen=True)
class Setup:
    """The same on every rank.

    Attributes:
        specs: of all trained parameters.
        device: their device.
        plan: the routes to begin with.
        layers: linear layers whose rows may be caught.
        chosen_later: whether a bandwidth manager decides which of them send rows; if not, all do.
    """

    specs: Sequence[LayerSpec]
    device: torch.device
    plan: Plan
    layers: frozenset[str]
    chosen_later: bool

    @classmethod
    def of(
        cls,
        module: nn.Module,
        group: Any,
        compressor: Rules | Policy | Plan,
        min_size: int,
        world: int | None = None,
    ) -> Setup:
        """For a model.

        Args:
            module: the DDP model, or the one inside.
            group: process group.
            compressor: as :class:`commlib.HookState` takes it.
            min_size: layers with fewer values stay dense.
            world: ranks that a route connects, if they are not the group's: under a hierarchy, nodes.

        Raises:
            ValueError, TypeError: a bad rule or model.
        """
        world = group.size() if world is None else world
        specs = layer_specs(inside(module), getattr(module, "parameters_to_ignore", ()))
        device = one_device(specs)
        policy = policy_of(compressor)
        if isinstance(compressor, dict):
            check_frozen_integers(inside(module), compressor)
        if policy is not None or isinstance(compressor, Policy):
            layers, why = _may_choose(module, group, device, min_size)
            plan = make_plan(specs, "none", world=world, min_size=min_size)
            return cls(specs, device, plan.because(str(policy), why or "measuring"), layers, bool(layers))
        if isinstance(compressor, Plan):
            plan = pin(compressor, specs, world)
        else:
            plan = make_plan(specs, compressor, world=world, min_size=min_size)
        sent = {p.spec.layer for p in plan if p.route.exchange == "factors"}
        if sent and waits_on_stream(group, device):
            raise ValueError("factors are not exchanged over NCCL yet: use Gloo, or another route")
        return cls(specs, device, plan, frozenset(name for name in sent if name is not None), False)

    def terms(self) -> dict[str, str]:
        """What ranks must have in common."""
        choice = {"layers to choose for": ", ".join(sorted(self.layers))} if self.chosen_later else {}
        return {**choice, **self.plan.describe()}

    def rounds(self) -> int:
        """The most rounds that any route has, or may get."""
        return max(2 if self.chosen_later else 1, *(p.route.carrier().ROUNDS for p in self.plan))


def check_count(name: str, value: object) -> None:
    """Raises ValueError if it is no whole number ≥ 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number ≥ 0, got {value!r}")


def _may_choose(module: nn.Module, group: Any, device: torch.device, min_size: int) -> tuple[frozenset[str], str]:
    """The linear layers that have another exact way than dense; if there are none, why."""
    none: frozenset[str] = frozenset()
    if not isinstance(module, DistributedDataParallel):
        return none, "attached to a module inside DDP, whose passes nobody sees: dense"
    if group.size() == 1:
        return none, "one rank only"
    if waits_on_stream(group, device):
        return none, "factors do not go over NCCL yet, and there is no other exact route"
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in module.modules()):
        return none, "the model is compiled, and catching rows would break its graph: dense"
    known = linear_layers(module.module, getattr(module, "parameters_to_ignore", ()))
    large = frozenset(name for name, m in known.items() if m.weight.numel() >= min_size)
    return large, "" if large else "no linear layer of its own has enough values: there is no other exact route"
