"""Outer optimizers: where values that all ranks share go when each has gone some steps from them by itself. Pure.

Every rank r starts from the shared values θ and comes to θ_r; its *difference* is Δ_r = θ − θ_r, a gradient of many
steps. Some form of the mean of all Δ_r is exchanged; a rule says how θ moves by it, and where a rank goes on from.
All ranks apply it to the same numbers in the same order, so θ stays bitwise equal everywhere.

Nothing here knows how a mean comes about: it may be coded, and lack what a residual holds back.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from commlib.runtime.plugins import from_table


@dataclasses.dataclass(frozen=True)
class OuterOptimizer(ABC):
    """A configuration; what it remembers lies in slots, tensors like the values, zero at first.

    Attributes:
        name: what a spec string calls it.
        first: the option that ``name:value`` means.
        slots: names of what it remembers.
        apart: ranks keep values of their own.
        codec: by which differences travel unless the user names one.
    """

    name: ClassVar[str]
    first: ClassVar[str] = ""
    slots: ClassVar[tuple[str, ...]] = ()
    apart: ClassVar[bool] = False
    codec: ClassVar[str] = "none"

    def check(self, world: int) -> None:
        """That it makes sense for so many ranks.

        Raises:
            ValueError: it does not; why.
        """
        if world < 1:
            raise ValueError(f"there is 1 rank or more, got {world}")

    @abstractmethod
    def move(self, shared: Tensor, mean: Tensor, world: int, slots: Mapping[str, Tensor]) -> None:
        """Moves the shared values, in place.

        Args:
            shared: θ, any shape.
            mean: of all ranks' differences, like it; may be overwritten.
            world: ranks.
            slots: by name, like it.
        """

    def rejoin(self, own: Tensor, shared: Tensor, delta: Tensor, world: int) -> None:
        """Where a rank goes on from, in place: the shared values, but for rules whose ranks stay apart.

        Args:
            own: θ_r.
            shared: θ, after :meth:`move`.
            delta: Δ_r, as it was.
            world: ranks.
        """
        own.copy_(shared)

    def __str__(self) -> str:
        """As :func:`make` reads it, with every option that is set."""
        options = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        told = ",".join(f"{k}={'on' if v is True else 'off' if v is False else v}" for k, v in options if v is not None)
        return f"{self.name}:{told}" if told else self.name


@dataclasses.dataclass(frozen=True)
class Average(OuterOptimizer):
    """The mean of all ranks' values (SparkNet: Moritz et al., ICLR 2016). Optimizers' momenta stay each rank's own."""

    name = "average"

    def move(self, shared: Tensor, mean: Tensor, world: int, slots: Mapping[str, Tensor]) -> None:
        shared.sub_(mean)


@dataclasses.dataclass(frozen=True)
class BlockMomentum(OuterOptimizer):
    """A momentum of whole blocks of steps (BMUF: Chen and Huo, ICASSP 2016; defaults as CNTK's).

    Args:
        momentum: μ; by default 1 − 1/P, with which a first block without Nesterov is plain averaging.
        rate: ζ, of a block.
        nesterov: ranks go on from where the momentum would carry them.
    """

    momentum: float | None = None
    rate: float = 1.0
    nesterov: bool = True

    name = "bmuf"
    first = "momentum"
    slots = ("momentum",)

    def __post_init__(self) -> None:
        if self.momentum is not None:
            _share("momentum", self.momentum)
        _positive("rate", self.rate)

    def move(self, shared: Tensor, mean: Tensor, world: int, slots: Mapping[str, Tensor]) -> None:
        mu, block = self.momentum if self.momentum is not None else 1 - 1 / world, slots["momentum"]
        block.mul_(mu).add_(mean, alpha=(1 - mu) * self.rate * world)  # G is the sum of the differences
        shared.sub_(block)
        if self.nesterov:
            shared.sub_(block, alpha=mu)


@dataclasses.dataclass(frozen=True)
class DiLoCo(OuterOptimizer):
    """Nesterov's momentum over the mean difference, as if that were a gradient (Douillard et al., 2023).

    Args:
        rate: of learning.
        momentum: of it; 0: none.
    """

    rate: float = 0.7
    momentum: float = 0.9

    name = "diloco"
    first = "rate"
    slots = ("momentum",)

    def __post_init__(self) -> None:
        _positive("rate", self.rate)
        _share("momentum", self.momentum)

    def move(self, shared: Tensor, mean: Tensor, world: int, slots: Mapping[str, Tensor]) -> None:
        kept = slots["momentum"].mul_(self.momentum).add_(mean)
        shared.sub_(mean.add_(kept, alpha=self.momentum), alpha=self.rate)


@dataclasses.dataclass(frozen=True)
class SparseLoCo(OuterOptimizer):
    """A step by the mean of what was sent, without momentum (arXiv 2508.15706): what was not is in a residual.

    Args:
        rate: of learning.
    """

    rate: float = 1.0

    name = "sparseloco"
    first = "rate"
    codec = "topk:ratio=0.015625,chunk=4096,values=twobit,ef=0.95"

    def __post_init__(self) -> None:
        _positive("rate", self.rate)

    def move(self, shared: Tensor, mean: Tensor, world: int, slots: Mapping[str, Tensor]) -> None:
        shared.sub_(mean, alpha=self.rate)


@dataclasses.dataclass(frozen=True)
class DeMo(OuterOptimizer):
    """A step of one size in each value's direction (Peng et al., arXiv 2411.19870): with τ = 1 and SGD, and its codec.

    Its momentum is the residual, of which the largest cosine coefficients leave in every step. Here coefficients that
    several ranks sent are averaged over all ranks, there over those that sent them.

    Args:
        rate: of learning.
    """

    rate: float = 0.001

    name = "demo"
    first = "rate"
    codec = "dct:ef=0.999"

    def __post_init__(self) -> None:
        _positive("rate", self.rate)

    def move(self, shared: Tensor, mean: Tensor, world: int, slots: Mapping[str, Tensor]) -> None:
        shared.sub_(mean.sign_(), alpha=self.rate)


@dataclasses.dataclass(frozen=True)
class Elastic(OuterOptimizer):
    """Ranks and a centre pull at each other, and ranks stay apart (EASGD: Zhang et al., NIPS 2015, section 3).

    The pull comes after the local steps, at the values that these have reached (as Torch's AllReduceEA has it), and the
    centre is on every rank. It conserves the sum of all ranks' values and the centre.

    Args:
        alpha: α, of a rank's distance to the centre that a pull takes away; by default 0.9/P, the paper's β = 0.9.
    """

    alpha: float | None = None

    name = "elastic"
    first = "alpha"
    apart = True

    def __post_init__(self) -> None:
        if self.alpha is not None:
            _positive("alpha", self.alpha)

    def check(self, world: int) -> None:
        super().check(world)
        if self._alpha(world) * (world + 1) >= 2:
            raise ValueError(
                f"elastic:alpha={self.alpha:g} swings ever further with {world} ranks: alpha must be below "
                f"2/(P + 1) = {2 / (world + 1):.4g}; 0.9/P = {0.9 / world:.4g} is the default"
            )

    def move(self, shared: Tensor, mean: Tensor, world: int, slots: Mapping[str, Tensor]) -> None:
        shared.sub_(mean, alpha=self._alpha(world) * world)

    def rejoin(self, own: Tensor, shared: Tensor, delta: Tensor, world: int) -> None:
        own.add_(delta, alpha=self._alpha(world))

    def _alpha(self, world: int) -> float:
        return 0.9 / world if self.alpha is None else self.alpha


RULES: Mapping[str, type[OuterOptimizer]] = {
    rule.name: rule for rule in (Average, BlockMomentum, DiLoCo, SparseLoCo, DeMo, Elastic)
}


def make(spec: str | OuterOptimizer) -> OuterOptimizer:
    """Make a rule from ``average``, ``bmuf:0.9``, ``diloco:rate=0.7,momentum=0.9``, ``sparseloco``,
    ``elastic:alpha=0.1``.

    Raises:
        ValueError: an unknown rule or option, or a value out of range.
    """
    return spec if isinstance(spec, OuterOptimizer) else from_table("rule of local steps", spec, RULES)


def _positive(what: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{what} must be above 0, got {value}")


def _share(what: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{what} must be in [0, 1), got {value}")
