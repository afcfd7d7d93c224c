"""This rank's part of some layers, and the stock optimizer that updates it.

Which rank owns which values, and how many bytes that makes. Pure.

Every layer is cut into one stripe a rank (CaffeOnSpark cuts all parameters in a row into equal chunks: a layer's own
cuts do not move when others are added). Where a codec counts by rows, stripes are of whole rows; all else is cut
between any two values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from commlib.codecs.base import Compressor, LayerSpec
from commlib.errors import CheckpointMismatch
from commlib.exchange.buffers import Packing
from commlib.exchange.scatter_gather import stripes
from commlib.groups.world import World
from commlib.planning.plan import Plan, PlannedLayer
from commlib.planning.planner import make_plan
from commlib.planning.policy import policy_of
from commlib.planning.route import Route, Rule, Rules
from commlib.runtime.optimizers import Recipe

NBYTES = 25 << 20
"""Of gradients that leave together, about: as DDP's buckets."""


@dataclasses.dataclass(frozen=True)
class LayerCut:
    """A layer as it is shared out.

    Attributes:
        spec: as it is exchanged: (n,) unless its codec counts by rows.
        codec: of its gradient on the way to owners.
    """

    spec: LayerSpec
    codec: Compressor

    def owned(self, rank: int, world: int) -> slice:
        """Slice of the layer's values in a row that a rank owns; perhaps none."""
        stripe = stripes(self.codec, self.spec, world)[rank]
        width = self.spec.numel // max(1, self.spec.shape[0])
        return slice(stripe.start * width, stripe.stop * width)


def plan_of(specs: Sequence[LayerSpec], rules: Rules, *, world: int, min_size: int | None) -> Plan:
    """How gradients travel to owners: by the codecs of rules, or as they are.

    Raises:
        ValueError: a bad rule; a codec whose payloads no owner can add up; a rule that names another exchange.
        TypeError: not a rule: a policy, a plan.
    """
    if isinstance(rules, Plan):
        raise TypeError("a Plan has routes of other exchanges: name a codec, or rules by layer")
    if policy_of(rules) is not None:
        raise TypeError(f"{rules} chooses by measurement, which is not done here: name a codec")
    named = {k: _carried(r) for k, r in rules.items()} if isinstance(rules, Mapping) else _carried(rules)
    made = make_plan(specs, named, world=world, min_size=min_size)
    return Plan({p.spec.name: _flat(p) for p in made}, world, recoded=False)


def _carried(rule: Rule) -> Rule:
    """A rule with the exchange whose first half this is."""
    text, at, exchange = rule.partition("@") if isinstance(rule, str) else (rule, "", "")
    if isinstance(rule, Route):
        at, exchange = "@", rule.exchange
    if at and exchange.strip() != "scatter_gather":
        raise ValueError(f"{rule}: gradients go to their owners here, by no other exchange: name a codec alone")
    if isinstance(text, str):
        return f"{text}@scatter_gather"
    return Route("scatter_gather", text) if isinstance(text, Compressor) else text


def _flat(layer: PlannedLayer) -> PlannedLayer:
    """Layer with the codec that it goes by to owners, and cut between any two values where that codec has no rows."""
    rowless = layer.route.exchange == "dense" or layer.route.codec.lossless
    spec = dataclasses.replace(layer.spec, shape=(layer.spec.numel,)) if rowless else layer.spec
    route = Route("scatter_gather", layer.route.codec)
    return PlannedLayer(spec, route, Route("scatter_gather", layer.dense.codec), layer.reason)


def buckets_of(plan: Plan, nbytes: int = NBYTES) -> list[list[LayerCut]]:
    """All layers in the order in which a backward pass reaches them, those of one dtype and device together."""
    found: list[list[LayerCut]] = []
    open_: dict[object, list[LayerCut]] = {}
    for layer in reversed(list(plan)):
        kind, cut = (layer.spec.dtype, layer.spec.device), LayerCut(layer.spec, layer.route.codec)
        row = open_.get(kind)
        if row is None or sum(c.spec.nbytes for c in row) + cut.spec.nbytes > nbytes:
            row = open_[kind] = []
            found.append(row)
        row.append(cut)
    return found


def rows_of(cuts: Sequence[LayerCut], world: int) -> list[Packing]:
    """Layout of every rank's values of these layers as bytes one after another."""
    return [
        Packing([_length(cut.owned(rank, world)) * cut.spec.dtype.itemsize for cut in cuts]) for rank in range(world)
    ]


def wire_bytes(buckets: Sequence[Sequence[LayerCut]], rank: int, world: int) -> int:
    """Payload bytes that a rank sends in a step: gradients to their owners, its values to all.

    Without a codec, of n values that divide evenly, that is an all-reduce's 2(P−1)/P·4n.
    """
    total = 0
    for cuts in buckets:
        owned = [[stripe.spec for stripe in stripes(c.codec, c.spec, world)] for c in cuts]
        coded = [[c.codec.nbytes(spec) for spec in specs] for c, specs in zip(cuts, owned, strict=True)]
        to = [Packing(lengths).total for lengths in zip(*coded, strict=True)]
        total += sum(to) - to[rank] + (world - 1) * max(row.total for row in rows_of(cuts, world))
    return total


def _length(part: slice) -> int:
    return int(part.stop - part.start)


_NOT_OPTIONS = ("params", "param_names")


@dataclasses.dataclass(frozen=True, eq=False)
class OwnedSlice:
    """Slice of one layer that a rank owns.

    Attributes:
        whole: the model's parameter.
        owned: of its values in a row.
        own: those, (n,), in the same memory as the parameter's.
        mean: (n,), of all ranks' gradients.
    """

    whole: nn.Parameter
    owned: slice
    own: nn.Parameter
    mean: Tensor

    @classmethod
    def of(cls, whole: nn.Parameter, owned: slice) -> OwnedSlice:
        """Slice of a parameter that a rank owns."""
        own = nn.Parameter(flat(whole)[owned])
        return cls(whole, owned, own, torch.zeros_like(own))

    def point(self, used: bool) -> None:
        """Point to where the parameter's values are now; with the mean as gradient, or with none."""
        self.own.data = flat(self.whole)[self.owned]
        self.own.grad = self.mean if used else None


def flat(p: Tensor) -> Tensor:
    """Values of a parameter in a row, in the same memory."""
    return p.detach().view(-1)


class OwnedSlices:
    """Slices of the layers of one bucket, with an optimizer of the user's class over them.

    Args:
        optimizer: the user's, whose options hold at every step; not stepped.
        parameters: name → parameter, of all.
        cuts: of the bucket's layers.
        world: this rank.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], cuts: Sequence[LayerCut], world: World
    ) -> None:
        self.cuts, self._user = cuts, optimizer
        self.by_name = {
            c.spec.name: OwnedSlice.of(parameters[c.spec.name], c.owned(world.rank, world.size)) for c in cuts
        }
        names = {id(p): n for n, p in parameters.items()}
        kind: Any = type(optimizer)
        groups = []
        for group in optimizer.param_groups:
            known = [self.by_name[n] for p in group["params"] if (n := names.get(id(p))) in self.by_name]
            groups.append({"params": [part.own for part in known if part.own.numel()], **_options(group)})
        self._stock: Optimizer = kind(groups)

    def step(self, used: Mapping[str, bool]) -> None:
        """Updates this rank's values by the means that are there; parameters that had no gradient stay."""
        for own, user in zip(self._stock.param_groups, self._user.param_groups, strict=True):
            own.update(_options(user))
        for name, part in self.by_name.items():
            part.point(used[name])
        self._stock.step()

    def state(self, name: str) -> dict[str, Any]:
        """Optimizer state of this rank's values of a layer: (n,) tensors, and single numbers."""
        found: dict[str, Any] = self._stock.state.get(self.by_name[name].own, {})
        return found

    def filled(self, name: str, key: str) -> Tensor:
        """A kind of state of a layer, (n,), of which this rank has filled in its part; the rest is zero."""
        part, own = self.by_name[name], self.state(name).get(key)
        found = torch.zeros_like(flat(part.whole))
        if isinstance(own, Tensor) and own.dim() == 1:
            found[part.owned] = own
        return found

    def restore(self, name: str, whole: Mapping[str, Any]) -> None:
        """Takes this rank's part of a layer's state; ``whole`` is as ``torch.optim`` has it.

        Raises:
            CheckpointMismatch: of a parameter of another shape.
        """
        part = self.by_name[name]
        if not part.own.numel():
            return
        found = self._stock.state[part.own]
        found.clear()
        for key, value in whole.items():
            if not isinstance(value, Tensor):
                found[key] = value
            elif value.shape == part.whole.shape:
                own = value.detach().reshape(-1)[part.owned]
                found[key] = own.to(device=part.own.device, copy=True)
            elif value.numel() == 1:
                found[key] = value.detach().clone()
            else:
                raise CheckpointMismatch(
                    f"{key} of {name} has shape {tuple(value.shape)}, and the parameter {tuple(part.whole.shape)}"
                )


def check_optimizer(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """Whether a part of a parameter can be updated by itself.

    Raises:
        ValueError: the optimizer looks at whole parameters (LAMB, Adafactor, Muon), or keeps state already; a
            parameter does not lie in one row.
    """
    if not Recipe(type(optimizer), {}).by_element:
        raise ValueError(
            f"{type(optimizer).__name__} is not known to treat every value by itself, and a rank has only a part of a "
            "parameter: give one of torch.optim's SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, RMSprop, "
            "Rprop, ASGD, or commlib.runtime.proximal.ProximalAdagrad"
        )
    scattered = [n for n, p in parameters.items() if not p.is_contiguous()]
    if scattered:
        raise ValueError(f"{scattered[0]} does not lie in one row of memory: call .contiguous() on its values first")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
