"""This rank's part of some layers, and the stock optimizer that updates it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from commlib.errors import CheckpointMismatch
from commlib.groups.world import World
from commlib.runtime.optimizers import Recipe
from commlib.zero.cuts import Cut

_NOT_OPTIONS = ("params", "param_names")


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Of one layer.

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
    def of(cls, whole: nn.Parameter, owned: slice) -> Part:
        """A rank's."""
        own = nn.Parameter(flat(whole)[owned])
        return cls(whole, owned, own, torch.zeros_like(own))

    def point(self, used: bool) -> None:
        """To where the parameter's values are now; with the mean as gradient, or with none."""
        self.own.data = flat(self.whole)[self.owned]
        self.own.grad = self.mean if used else None


def flat(p: Tensor) -> Tensor:
    """Its values in a row, in the same memory."""
    return p.detach().view(-1)


class Parts:
    """Of the layers of one bucket, with an optimizer of the user's class over them.

    Args:
        optimizer: the user's, whose options hold at every step; not stepped.
        parameters: name → parameter, of all.
        cuts: of the bucket's layers.
        world: this rank.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], cuts: Sequence[Cut], world: World
    ) -> None:
        self.cuts, self._user = cuts, optimizer
        self.by_name = {c.spec.name: Part.of(parameters[c.spec.name], c.owned(world.rank, world.size)) for c in cuts}
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
        """What the optimizer has of this rank's values of a layer: (n,) tensors, and single numbers."""
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
            "Rprop, ASGD"
        )
    scattered = [n for n, p in parameters.items() if not p.is_contiguous()]
    if scattered:
        raise ValueError(f"{scattered[0]} does not lie in one row of memory: call .contiguous() on its values first")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
