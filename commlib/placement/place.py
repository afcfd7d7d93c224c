"""``place``: some linear layers of a model stay put, before DDP wraps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.__version__ import __version__
from commlib.errors import unknown
from commlib.groups.handshake import agree, meeting_place, publish_failure
from commlib.groups.process_groups import group_of, sibling, waits_on_stream
from commlib.groups.world import World
from commlib.placement.choose import Considered, decide
from commlib.placement.communication import DTYPES, PlacementChannel, RowCoder
from commlib.placement.linear import PlacedLinear, placed_layers
from commlib.placement.profile import measure
from commlib.runtime.layers import LayerSpec, linear_layers, one_device

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Layers that were placed, and why. Prints as a table.

    Attributes:
        layers: name → placed layer, in the model's order.
        considered: what ``auto`` has weighed up, by layer; empty if the layers were named.
        world: this rank.
    """

    layers: Mapping[str, PlacedLinear]
    considered: Considered | None
    world: World

    def __str__(self) -> str:
        if self.considered is not None:
            return str(self.considered)
        rows = [
            f"{n}  {m.out_features}×{m.in_features}  rows in {self.world.size} parts" for n, m in self.layers.items()
        ]
        return "\n".join(rows) or "nothing is placed"


def place(
    model: nn.Module,
    which: str | Sequence[str] = AUTO,
    *,
    example: Any = None,
    process_group: Any = None,
    init_sync: bool = True,
    timeout: float = 300.0,
    codec: str = "none",
) -> Placement:
    """Shares out linear layers' weights over the ranks for good: activations travel, not gradients. Collective.

    Before the optimizer is made, and before DDP wraps the model::

        placement = commlib.place(model, "auto", example=inputs)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        comm = commlib.attach(ddp)  # for all that is not placed

    Exact, but for the order of sums (without a codec). From now on every rank must call the model as often as the
    others, for evaluation too; ``state_dict`` has each rank's part (:mod:`commlib.placement.state_dict` has whole ones,
    and ``clip_grad_norm_``).

    Args:
        model: not wrapped in DDP. Its layers are replaced in place.
        which: names of linear layers, with wildcards, or several; or ``auto``: those by which steps become shorter, as
            measured here, and as the first rank decides on the slowest rank's figures.
        example: for ``auto``: inputs of a step, a tensor or a tuple of arguments. One or two passes are made with it.
        process_group: that DDP will have; by default all ranks.
        init_sync: give all ranks the first one's weights, as DDP does; False where they are alike already.
        timeout: seconds to wait for the other ranks here.
        codec: how activations and their gradients travel (``fp16``, ``int8``), not weights and biases. Its error stays
            in the step (:mod:`commlib.placement.communication`).

    Raises:
        ValueError, TypeError: a bad option, name or model; the message says which layers there are.
        PlanMismatch: another rank places something else; every rank raises it.
        PeerLost: a rank did not come in time.
    """
    group = group_of(model, process_group)
    world = World(dist.get_rank(group), dist.get_world_size(group))
    key = meeting_place(group, world)
    try:
        if isinstance(model, DistributedDataParallel):
            raise TypeError("the model is wrapped in DDP, which would reduce placed layers: place first, then wrap")
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds > 0, got {timeout!r}")
        auto, coder = which == AUTO, RowCoder(codec)
        if auto and example is None:
            raise ValueError("'auto' measures a step: give example=, its inputs; or name the layers to be placed")
        found = _placeable(model)
        layers = found if auto else chosen(model, found, [which] if isinstance(which, str) else list(which))
        device = _device(layers, group)
    except Exception as e:
        publish_failure(group, key, world, e)
        raise
    terms = {n: f"{tuple(m.weight.shape)} {m.weight.dtype} bias={m.bias is not None}" for n, m in layers.items()}
    agree(group, key, {"commlib": __version__, "place": str(which), "codec": str(coder), **terms}, world, timeout)
    if world.size == 1 or not layers:
        return Placement({}, None, world)
    own = sibling(group, device)
    considered = None
    if auto:
        figures = measure(model, layers, example, own, world)
        considered = decide(figures, coder=coder)
        agree(group, f"{key}/chosen", {"placed": ", ".join(considered.placed)}, world, timeout)
        layers = {n: m for n, m in layers.items() if n in considered.placed}
    channel = PlacementChannel(own, world, f"{key}/lost", coder)
    return Placement(_replace(model, layers, channel, init_sync), considered, world)


def chosen(model: nn.Module, placeable: Mapping[str, nn.Linear], patterns: Sequence[str]) -> dict[str, nn.Linear]:
    """The layers of these names.

    Raises:
        ValueError: one matches none, or one that cannot be placed.
    """
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    wanted: set[str] = set()
    for pattern in patterns:
        matched = [name for name in linear if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(unknown("linear layer", pattern, linear))
        for name in matched:
            if name not in placeable:
                raise ValueError(
                    f"layer {name!r} cannot be placed: it is not a plain nn.Linear with trained parameters of its own "
                    "(a subclass, parametrized, frozen, or it shares its weight); name others"
                )
        wanted.update(matched)
    return {name: m for name, m in placeable.items() if name in wanted}


def _placeable(model: nn.Module) -> dict[str, nn.Linear]:
    if placed_layers(model):
        raise ValueError("the model has placed layers already: name all of them in one call")
    if isinstance(model, nn.Linear):
        raise ValueError("the model is itself the linear layer, and cannot be replaced: put it into nn.Sequential")
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return {n: m for n, m in linear_layers(model, ignored).items() if m.weight.dtype in DTYPES}


def _device(layers: Mapping[str, nn.Linear], group: Any) -> torch.device:
    specs = [LayerSpec(n, tuple(m.weight.shape), m.weight.dtype, m.weight.device) for n, m in layers.items()]
    device = one_device(specs) if specs else torch.device("cpu")
    if waits_on_stream(group, device):
        raise ValueError("layers are not placed over NCCL yet: use Gloo, or torch.distributed.tensor.parallel")
    return device


def _replace(
    model: nn.Module, layers: Mapping[str, nn.Linear], channel: PlacementChannel, init_sync: bool
) -> dict[str, PlacedLinear]:
    """Replace layers in place, in the model's order; DDP is told."""
    made: dict[str, PlacedLinear] = {}
    for number, (name, linear) in enumerate(layers.items()):
        made[name] = PlacedLinear(linear, name, number, channel)
        parent, _, local = name.rpartition(".")
        setattr(model.get_submodule(parent), local, made[name])
        if init_sync:
            own, whole = made[name].weight.detach(), linear.weight.detach()
            channel.scatter(f"the first weights of {name!r}", whole, own, made[name].cuts)
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    ignored = [*before, *(f"{name}.weight" for name in made)]
    ddp: Any = DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ignored)
    return made
