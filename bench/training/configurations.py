"""Configurations that are compared: plain DDP, PyTorch's own communication hooks, commlib's routes; layers that stay
put."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.errors import unknown
from commlib.planning.policy import policy_of
from commlib.planning.route import resolve

from .workloads import Workload

if TYPE_CHECKING:
    from commlib.fsdp.state import ShardedState

BASELINE = "ddp"
PLACED = "placed"
COMMLIB = ("auto", "none", "fp16", "int8", "onebit", "topk:ratio=0.01", "powersgd:rank=4")
QUICK = (BASELINE, "torch-fp16", "auto", "int8", "onebit", "powersgd:rank=4")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Way for gradients to travel.

    Args:
        name: ``ddp``, a hook of PyTorch's (``torch-…``), a spec of commlib's; or ``placed``, which places the layers
            that commlib chooses, and ``placed:NAMES``, linear layers by wildcards with + between them.
        by: ``pytorch`` or ``commlib``.
        exact: whether it hands over the mean gradient itself, but for the order of the sum.
        limit: of what a rank sends, as ``50mbit``; of commlib's only.
        hierarchy: whether it sums inside nodes first; of commlib's only.
    """

    name: str
    by: str
    exact: bool
    limit: str | None = None
    hierarchy: bool = False

    @property
    def managed(self) -> bool:
        """Whether a bandwidth manager chooses its routes."""
        return self.by == "commlib" and policy_of(self.spec) is not None

    @property
    def places(self) -> tuple[str, ...]:
        """Which layers stay put: names, or ``auto``; empty if none."""
        kind, _, names = self.name.partition(":")
        return tuple((names or "auto").split("+")) if self.by == "commlib" and kind == PLACED else ()

    @property
    def spec(self) -> str:
        """How gradients travel, by a spec of commlib's: beside placed layers chosen as these are, or as they are."""
        if not self.places:
            return self.name
        return "auto" if self.places == ("auto",) else "none"

    def wrap(
        self, course: Workload, group: Any, timeout: float, options: Mapping[str, Any] | None = None
    ) -> tuple[nn.Module, commlib.HookState | ShardedState | None]:
        """Make the course's module train over ``group``, with gradients that travel this way. Collective.

        Args:
            course: of this visit; all ranks have made the same model.
            group: a process group of this visit's own.
            timeout: seconds in which the other ranks must have come.
            options: of DDP, as ``bucket_cap_mb`` and ``gradient_as_bucket_view``; others are DDP's own.

        Returns:
            What a step calls, and commlib's state if it is commlib's.
        """
        if self.places:
            course.place(self.places, group, timeout)
        # All ranks have made the same model: nothing to be broadcast.
        ddp = DistributedDataParallel(course.module, process_group=group, init_sync=False, **options or {})
        return ddp, self.put_on(ddp, group, timeout)

    def put_on(self, ddp: DistributedDataParallel, group: Any, timeout: float) -> commlib.HookState | None:
        """Register it on a DDP over ``group``. Collective.

        Args:
            timeout: seconds in which the other ranks must have come.

        Returns:
            Its state, if it is commlib's.
        """
        if self.by == "commlib":
            return commlib.attach(ddp, self.spec, timeout=timeout, limit=self.limit, hierarchy=self.hierarchy)
        if self.name != BASELINE:
            state, hook = _HOOKS[self.name](group)
            ddp.register_comm_hook(state, hook)
        return None


def _power_sgd(group: Any, rank: int = 4) -> tuple[object, Any]:
    # Two steps are the fewest it takes: DDP rebuilds its buckets after the first. They are not timed.
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


_HOOKS: Mapping[str, Callable[[Any], tuple[object, Any]]] = {
    "torch-allreduce": lambda group: (group, default_hooks.allreduce_hook),  # what a hook costs that does as DDP does
    "torch-fp16": lambda group: (group, default_hooks.fp16_compress_hook),
    "torch-bf16": lambda group: (group, default_hooks.bf16_compress_hook),
    "torch-int8": lambda group: (group, quantization_hooks.quantization_pertensor_hook),
    "torch-powersgd": _power_sgd,
    "torch-powersgd:rank=2": functools.partial(_power_sgd, rank=2),
}
_EXACT = {"torch-allreduce"}
_BY_NAME = {"torch-allreduce", "torch-powersgd:rank=2"}  # race only if they are asked for


def choose(
    comm: Sequence[str],
    only: Sequence[str],
    world_size: int,
    *,
    quick: bool = False,
    limit: str | None = None,
    hierarchy: bool = False,
) -> list[Configuration]:
    """The contenders, the baseline first.

    Args:
        comm: commlib's routes, instead of :data:`COMMLIB`.
        only: names of those that shall race; the baseline does in any case. Empty: all, or :data:`QUICK`.
        world_size: what a route's default exchange depends on.
        quick: without ``comm`` and ``only``, only those of :data:`QUICK`.
        limit, hierarchy: of commlib's contenders; PyTorch's know neither.

    Raises:
        ValueError: a name or a spec that is not known, or one given twice.
    """
    pytorch = [Configuration(BASELINE, "pytorch", True), *(Configuration(n, "pytorch", n in _EXACT) for n in _HOOKS)]
    ours = [Configuration(c, "commlib", _exact(c, world_size), limit, hierarchy) for c in comm or COMMLIB]
    every = [*pytorch, *ours]
    return pick(every, only, QUICK if quick and not comm else [c.name for c in every if c.name not in _BY_NAME])


def pick(every: Sequence[Configuration], only: Sequence[str], usual: Sequence[str]) -> list[Configuration]:
    """Configurations that shall be compared, in their order.

    Args:
        every: the baseline first, which races in any case.
        only: names that were asked for; empty: the usual ones.
        usual: names; empty: all.

    Raises:
        ValueError: a name that is not among them, or one that is there twice.
    """
    known: dict[str, Configuration] = {}
    for c in every:
        if known.setdefault(c.name, c) is not c:
            raise ValueError(f"--comm {c.name!r} is given twice")
    for name in only:
        if name not in known:
            raise ValueError(unknown("contender", name, known) + "; a spec of commlib's comes in by --comm")
    wanted = {every[0].name, *(only or usual or known)}
    return [c for c in every if c.name in wanted]


def _exact(spec: str, world_size: int) -> bool:
    if spec.partition(":")[0] == PLACED:
        return True
    policy = policy_of(spec)
    return resolve(spec, world_size).codec.lossless if policy is None else not policy.routes(world_size)
