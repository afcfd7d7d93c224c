"""Configuration that attaching works out from a model and the user's options, before anything is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.__version__ import __version__
from commlib.codecs.base import Compressor
from commlib.ddp.compat import check_beside
from commlib.exchange.factors.layers import FactorLayers
from commlib.exchange.hierarchy import Hierarchy
from commlib.exchange.registry import BY_ROWS, BY_SERVERS
from commlib.groups.process_groups import waits_on_stream
from commlib.planning.plan import Plan, pin
from commlib.planning.planner import make_plan
from commlib.planning.policy import Policy, policy_of
from commlib.planning.route import Route, Rules
from commlib.runtime.layers import LayerSpec, check_frozen_integers, inside, layer_specs, linear_layers, one_device
from commlib.server.worker.push_pull import Servers


@dataclasses.dataclass(frozen=True)
class AttachConfig:
    """The same on every rank.

    Attributes:
        specs: of all trained parameters.
        device: their device.
        plan: the routes to begin with.
        layers: linear layers whose rows may be caught.
        choice: what a bandwidth manager chooses among: route → the plan in which everything goes by it that can.
            Empty without one: then all layers send their rows.
        policy: in words.
    """

    specs: Sequence[LayerSpec]
    device: torch.device
    plan: Plan
    layers: frozenset[str]
    choice: Mapping[str, Plan]
    policy: str = ""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        group: Any,
        compressor: Rules | Policy | Plan,
        min_size: int | None,
        hierarchy: Hierarchy | None = None,
        servers: Servers | None = None,
        *,
        idle: bool = False,
    ) -> AttachConfig:
        """Read a user's rules for a model.

        Args:
            module: the DDP model, or the one inside.
            group: process group.
            compressor: as :class:`commlib.HookState` takes it.
            min_size: layers with fewer values stay dense; None: as each codec has it.
            hierarchy: nodes, if there are some: routes connect these, unless they are flat.
            servers: that may sum gradients, if there are any.
            idle: whether servers may have nothing to do.

        Raises:
            ValueError, TypeError: a bad rule or model; servers that nothing goes by, or none where something does.
        """
        world = group.size() if hierarchy is None else hierarchy.inter.size
        check_beside(module)
        specs = layer_specs(inside(module), getattr(module, "parameters_to_ignore", ()))
        device = one_device(specs)
        _check_servers(servers, group, device, hierarchy)
        policy = policy_of(compressor)
        if isinstance(compressor, dict):
            check_frozen_integers(inside(module), compressor)
        if policy is not None:
            return cls._chosen_later(module, group, specs, policy, min_size, hierarchy, servers is not None)
        if isinstance(compressor, Plan):
            plan = pin(compressor, specs, world)
        else:
            rules = cast(Rules, compressor)  # no policy
            plan = make_plan(specs, rules, world=world, min_size=min_size)
        sent = {p.spec.layer for p in plan if p.route.by_rows}
        why = _no_rows(module, group, device, hierarchy) if sent else ""
        if why:
            raise ValueError(f"factors and owners: {why}; use Gloo, or another route")
        found = cls(specs, device, plan, frozenset(name for name in sent if name is not None), {})
        _check_served(found, servers, idle)
        return found

    @classmethod
    def _chosen_later(
        cls,
        module: nn.Module,
        group: Any,
        specs: Sequence[LayerSpec],
        policy: Policy,
        min_size: int | None,
        hierarchy: Hierarchy | None,
        servers: bool,
    ) -> AttachConfig:
        device, said = specs[0].device, str(policy)
        world = group.size() if hierarchy is None else hierarchy.inter.size
        plan = make_plan(specs, "none", world=world, min_size=min_size)
        routes = policy.routes(world)
        unpriced = [] if hierarchy is None else [str(r) for r in routes if not r.by_rows]
        if unpriced:
            said += f", without {', '.join(unpriced)}: under a hierarchy nobody measures yet what they cost"
        found = {str(r): r for r in routes if str(r) not in unpriced}
        compressed = {name: make_plan(specs, r, world=world, min_size=min_size) for name, r in found.items()}
        why = _no_choice(module, group)
        if why:
            return cls(specs, device, plan.because(said, why), frozenset(), {}, said)
        layers, why = _with_rows(module, min_size)
        if layers and (reason := _no_rows(module, group, device, hierarchy)):
            layers, why = frozenset(), f"rows cannot be sent: {reason}"
        choice = {
            name: p
            for name, p in compressed.items()
            if any(str(x.route) == name and (x.spec.layer in layers or not x.route.by_rows) for x in p)
        }
        if layers:
            choice |= {name: make_plan(specs, name, world=world, min_size=min_size) for name in BY_ROWS}
        if servers:
            by = {name: make_plan(specs, name, world=world, min_size=min_size) for name in BY_SERVERS}
            choice |= {name: p for name, p in by.items() if any(x.route.exchange == name for x in p)}
        return cls(specs, device, plan.because(said, "measuring" if choice else why), layers, choice, said)

    @property
    def chosen_later(self) -> bool:
        """Whether a bandwidth manager chooses."""
        return bool(self.choice)

    @property
    def plans(self) -> list[Plan]:
        """All that may come into force."""
        return [self.plan, *self.choice.values()]

    def served(self) -> list[LayerSpec]:
        """The layers that go by servers, or may come to."""
        names = {p.spec.name for plan in self.plans for p in plan if p.route.exchange in BY_SERVERS}
        return [s for s in self.specs if s.name in names]

    def terms(self, factors: FactorLayers | None, options: Mapping[str, object]) -> dict[str, str]:
        """Terms that ranks must have in common, with the values of options."""
        choice = {
            "chosen among": ", ".join(sorted(self.choice)),
            "layers whose rows may be sent": ", ".join(sorted(self.layers)),
        }
        given = {"commlib": __version__} | {k: "none" if v is None else str(v) for k, v in options.items()}
        if factors is not None and self.same_products:  # a manager of unlike ranks just does not choose them
            given |= factors.terms()
        return {**given, **(choice if self.choice else {}), **self.plan.describe()}

    def exchanges(self) -> frozenset[str]:
        """All that any layer goes by, or may come to; ``dense`` in any case."""
        return frozenset({"dense", *(p.route.exchange for plan in self.plans for p in plan)})

    def codecs(self) -> list[Compressor]:
        """All that any layer goes by, or may come to."""
        return [p.route.codec for plan in self.plans for p in plan]

    def reduced(self) -> set[str]:
        """Codecs, as spec strings, that go by all-reduces only."""
        routes = [p.route for plan in self.plans for p in plan]
        return {str(r.codec) for r in routes} - {str(r.codec) for r in routes if r.exchange != "dense"}

    def row_routes(self) -> dict[str, Route]:
        """Linear layer → how its rows travel, by the plan to begin with."""
        return {p.spec.layer: p.route for p in self.plan if p.route.by_rows and p.spec.layer is not None}

    @property
    def same_products(self) -> bool:
        """Whether, by the plan to begin with, every rank multiplies the same rows; not so where each has an owner."""
        return any(p.route.exchange == "factors" for p in self.plan)


def _check_servers(servers: Servers | None, group: Any, device: torch.device, hierarchy: Hierarchy | None) -> None:
    """Whether these ranks can use them."""
    if servers is None:
        return
    if waits_on_stream(group, device):
        raise ValueError("push_pull does not go beside NCCL yet: use Gloo, or leave servers out")
    if hierarchy is not None:
        raise ValueError("push_pull does not go under a hierarchy: give servers or hierarchy")
    if servers.embedded and group.size() < dist.get_world_size():
        raise ValueError(
            f"embedded servers are for all {dist.get_world_size()} ranks, and this model has {group.size()} of them: "
            "start others (commlib server meet, commlib server run), and give servers='HOST:PORT'"
        )


def _check_served(setup: AttachConfig, servers: Servers | None, idle: bool) -> None:
    served = setup.served()
    if served and servers is None:
        raise ValueError(f"{served[0].name} goes by push_pull, and there are no servers: give servers='HOST:PORT'")
    if servers is not None and not served and not idle:
        why = "; ".join(dict.fromkeys(p.reason for p in setup.plan))
        raise ValueError(f"servers are given, and no layer goes by push_pull ({why}): give 'none@push_pull', or none")


def _no_choice(module: nn.Module, group: Any) -> str:
    """Why there can be no bandwidth manager here; empty if there can."""
    if not isinstance(module, DistributedDataParallel):
        return "attached to a module inside DDP, whose passes nobody sees: dense"
    if group.size() == 1:
        return "one rank only"
    return ""


def _no_rows(module: nn.Module, group: Any, device: torch.device, hierarchy: Hierarchy | None) -> str:
    """Why no layer's rows can be sent, whatever the layer; empty if they can."""
    if not waits_on_stream(group, device):
        return ""
    if hierarchy is not None:
        return (
            "over NCCL they do not go beside a hierarchy, for ranks would have several communicators in flight at "
            "once, and may take them up in different orders"
        )
    if getattr(module, "skip_all_reduce_unused_params", False):
        return "over NCCL they go in the order of DDP's buckets, of which skip_all_reduce_unused_params leaves some out"
    return ""


def _with_rows(module: nn.Module, min_size: int | None) -> tuple[frozenset[str], str]:
    """The linear layers that have another exact way than dense; if there are none, why."""
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in module.modules()):
        return frozenset(), "the model is compiled, and catching rows would break its graph: dense"
    least = Compressor.min_size if min_size is None else min_size
    known = linear_layers(inside(module), getattr(module, "parameters_to_ignore", ()))
    large = frozenset(name for name, m in known.items() if m.weight.numel() >= least)
    return large, "" if large else "no linear layer of its own has enough values: there is no other exact route"
