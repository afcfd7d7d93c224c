"""Optimizers that others step: recipes by which a shard makes them, a guard for the user's, one that replaces values.

A shard makes an optimizer for each chunk by a :class:`Recipe`: the user's class, and the options of the parameter's
group. :class:`StepGuard` keeps the user from stepping his own meanwhile. :class:`Replace` is for keys that hold no
model but what was pushed last: gradients that are summed at shards, and pulled by all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from commlib.errors import CommlibError
from commlib.runtime.proximal import ProximalAdagrad


class Replace(Optimizer):
    """Puts a gradient in the values' place. Its cell lets all through that an all-reduce would: NaN and infinities too.

    Args:
        params: as of any optimizer.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss to return
        """Once; a parameter without a gradient stays as it is."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(p.grad)


BY_ELEMENT: frozenset[str] = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}
)
"""Of ``torch.optim``: those that treat every value by itself, and so do to chunks what they do to a whole parameter."""

OURS: Mapping[str, type[Optimizer]] = {
    "commlib.server.replace:Replace": Replace,
    "commlib.runtime.proximal:ProximalAdagrad": ProximalAdagrad,
}
"""Name → optimizer of ours, by which a shard and a snapshot know it wherever its class lies. They do so, too."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How values are updated.

    Args:
        kind: class of the optimizer.
        options: of its group: ``lr`` and so on.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]

    @property
    def by_element(self) -> bool:
        """Whether a parameter may be cut into chunks."""
        known = self.kind.__module__.startswith("torch.optim.") and self.kind.__name__ in BY_ELEMENT
        return known or self.kind in OURS.values()

    def make(self, parameters: Sequence[torch.nn.Parameter]) -> Optimizer:
        """Make the optimizer for these values, with no state yet."""
        kind: Any = self.kind
        made: Optimizer = kind([{"params": list(parameters), **self.options}])
        return made


def recipes(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Recipe]:
    """Name → recipe.

    Args:
        optimizer: the user's; its state is not read.
        parameters: by name.

    Raises:
        ValueError: it has a parameter that is not one of these, or lacks one that needs a gradient, which is named.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    found = {
        name: Recipe(type(optimizer), {k: v for k, v in groups[id(p)].items() if k != "params"})
        for name, p in parameters.items()
        if id(p) in groups
    }
    lacking = [name for name, p in parameters.items() if p.requires_grad and name not in found]
    if lacking:
        raise ValueError(f"the optimizer lacks {_some(lacking)}: every parameter that needs a gradient must be in it")
    if len(groups) > len({id(parameters[name]) for name in found}):
        raise ValueError("the optimizer has parameters that are not the model's: give it model.parameters()")
    return found


def by_group(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> tuple[list[Recipe], dict[str, int]]:
    """A recipe for each group of the optimizer, and name → which: their options may part later."""
    made = recipes(optimizer, parameters)
    group = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    chosen = {name: group[id(p)] for name, p in parameters.items() if p.requires_grad}
    used = sorted(set(chosen.values()))
    found = {i: made[next(n for n, g in chosen.items() if g == i)] for i in used}
    numbers = [Recipe(r.kind, {k: plain(v) for k, v in r.options.items()}) for r in found.values()]
    return numbers, {name: used.index(i) for name, i in chosen.items()}


def groups_of(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Mapping[str, Any]]:
    """Name → the group that it is in: its options as they are now."""
    names = {id(p): name for name, p in parameters.items()}
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"] if id(p) in names}


def plain(value: Any) -> Any:
    """An option as Python has it where it is a number of numpy's, or a tensor of one; in tuples, too."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    one = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
    return value.item() if one else value


def like(value: Any, made: Any) -> bool:
    """Whether an optimizer that was made with an option can go on with another value of it.

    It is of the same kind; numbers are finite, not negative where that was not, and below 1 in a tuple (as ``betas``)
    where that was. An option without a value, as ``foreach``, may be set or not.
    """
    if made is None or isinstance(made, bool):
        return value is None or isinstance(value, bool)
    if isinstance(made, int | float):
        return _is_number(value) and (value >= 0 or made < 0)
    if isinstance(made, tuple | list):
        alike = isinstance(value, tuple | list) and len(value) == len(made)
        return alike and all(like(v, m) and (v < 1 or m >= 1) for v, m in zip(value, made, strict=True))
    return type(value) is type(made)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


_SHARDS = "the parameter server's shards update the parameters: call server.step()"


class StepGuard:
    """Guard over one optimizer, until :meth:`remove`: its ``step()`` raises CommlibError.

    Args:
        optimizer: this one.
        instead: who does, and what is to be called.
    """

    def __init__(self, optimizer: Optimizer, instead: str = _SHARDS) -> None:
        self._optimizer, self._instead = optimizer, instead
        self._handle = optimizer.register_step_pre_hook(self._not_here)

    def step(self) -> None:
        """Steps it all the same."""
        self._handle.remove()
        try:
            self._optimizer.step()
        finally:
            self._handle = self._optimizer.register_step_pre_hook(self._not_here)

    def remove(self) -> None:
        """Give the optimizer back to the user as it was."""
        self._handle.remove()

    def _not_here(self, *_: Any) -> None:
        raise CommlibError(f"{self._instead}, not optimizer.step()")
