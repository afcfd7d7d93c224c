"""Groups of parameters that ``fully_shard`` has made of a model: the only file that knows FSDP2's insides.

A *unit* is what communicates together: the parameters of one ``fully_shard`` call. FSDP2 hands a communication flat
memory and no names, so which parameter lies where has to be seen from outside: by the unit's list of parameters, and
by which of them have a gradient when a backward pass comes to the unit's end.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from commlib.codecs.base import LayerSpec
from commlib.errors import CommlibError
from commlib.groups.process_groups import sibling
from commlib.runtime.layers import all_parameters, kinds_of, plain_name, refuse_sparse

_NEEDED = ("set_custom_reduce_scatter", "set_custom_all_gather")


def is_sharded(model: object) -> bool:
    """Whether ``fully_shard`` was called on it. (Without importing FSDP2, which takes a while.)"""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, getattr(fsdp, "FSDPModule", ()))


@dataclasses.dataclass(eq=False)
class ParamGroup:
    """Parameters of one ``fully_shard`` call.

    Attributes:
        name: of the module, for people.
        inner: torch's ``FSDPParamGroup``.
        module: the ``FSDPModule``.
        names: of all parameters, trained or not, in the order in which they lie in memory.
        specs: of the trained ones, by name; float dtype as stored.
        present: names of those that had a gradient as the last backward pass came to the unit's end.
        summed: whether any of them had been summed over several backward passes, as without synchronisation.
        alone: a process group of this rank, where nothing is sharded.
    """

    name: str
    inner: Any
    module: Any
    names: list[str]
    specs: dict[str, LayerSpec]
    present: list[str] = dataclasses.field(default_factory=list)
    summed: bool = False
    alone: Any = None

    @property
    def shard_group(self) -> Any:
        """The process group whose ranks share the parameters out; under ``replicate`` of this rank alone."""
        return getattr(self.inner.mesh_info, "shard_process_group", self.alone)

    @property
    def replicate_group(self) -> Any:
        """Under HSDP and ``replicate`` the group of the ranks that hold the same shard; None without."""
        return getattr(self.inner.mesh_info, "replicate_process_group", None)

    @property
    def halves(self) -> bool:
        """Whether gradients are computed in bf16, and summed over the ranks in float32."""
        policy = self.inner.mp_policy
        return bool(policy.param_dtype == torch.bfloat16 and policy.reduce_dtype == torch.float32)

    def watch(self) -> Callable[[], None]:
        """Has ``present`` told from now on; returns what undoes it."""
        original = self.inner.post_backward

        def post_backward(*args: Any) -> Any:
            self.present = list(self._with_gradient())
            self.summed = any(
                hasattr(p, "_unsharded_param") and p.unsharded_accumulated_grad is not None
                for p in self.inner.fsdp_params
            )
            try:
                return original(*args)
            except ValueError as e:  # PyTorch logs a collective's error, and then wants to know the group it was of
                if isinstance(e.__context__, CommlibError):
                    raise e.__context__ from None
                raise

        self.inner.post_backward = post_backward
        return lambda: self._restore("post_backward")

    def across(self, make: Callable[[Any], Any]) -> Callable[[], None]:
        """Puts another process group in the place of the one between replicas; returns what undoes it."""
        before = self.inner.mesh_info
        self.inner.mesh_info = copy.copy(before)  # other units share it
        self.inner.mesh_info.replicate_process_group = make(before.replicate_process_group)

        def undo() -> None:
            self.inner.mesh_info = before

        return undo

    def to_owners(self, make: Callable[[Any], Any]) -> Callable[[], None]:
        """Has gradients go by a reduce-scatter that is made of the one there is; returns what undoes it."""
        before = self.inner._reduce_scatter_comm
        self.module.set_custom_reduce_scatter(make(before))
        return lambda: self.module.set_custom_reduce_scatter(before)

    def to_all(self, make: Callable[[Any], Any]) -> Callable[[], None]:
        """Has parameters come by an all-gather that is made of the one there is; returns what undoes it."""
        before = self.inner._all_gather_comm
        self.module.set_custom_all_gather(make(before))
        return lambda: self.module.set_custom_all_gather(before)

    def gathered(self) -> list[LayerSpec]:
        """Chunks of every parameter that this rank has, padded as an all-gather has them, in order; dtype as in a
        pass."""
        cast = self.inner.mp_policy.param_dtype
        return [
            LayerSpec(name, tuple(p.padded_sharded_param_size), cast or p.sharded_param.dtype, self.inner.device)
            for name, p in zip(self.names, self.inner.fsdp_params, strict=True)
        ]

    def _with_gradient(self) -> Iterator[str]:
        """Parameters that have a gradient, by the rules of ``FSDPParamGroup.post_backward``."""
        all_of_them = getattr(self.inner, "reduce_scatter_unused_params", False)
        for name, p in zip(self.names, self.inner.fsdp_params, strict=True):
            if not hasattr(p, "_unsharded_param"):
                continue
            had = p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None
            if had or (all_of_them and p.unsharded_param.requires_grad):
                yield name

    def _restore(self, attribute: str) -> None:
        with contextlib.suppress(KeyError):
            del self.inner.__dict__[attribute]


def units_of(model: nn.Module) -> list[ParamGroup]:
    """All units of a model that ``fully_shard`` was called on.

    Raises:
        TypeError: it was not.
        ValueError: something that cannot be exchanged right: the message says what and why.
        CommlibError: this PyTorch cannot be given a communication.
    """
    if not is_sharded(model):
        raise TypeError(f"this is no model that fully_shard() was called on, but {type(model).__name__}")
    missing = [name for name in _NEEDED if not hasattr(model, name)]
    if missing:
        raise CommlibError(
            f"torch {torch.__version__} has no {' and '.join(missing)} on FSDP2's modules, which compression needs: "
            "update torch (2.13 is known to work)"
        )
    refuse_sparse(model, "FSDP2")
    names = {id(p): plain_name(name) for name, p in all_parameters(model).items()}
    kinds = kinds_of(model)
    found = []
    for prefix, module in model.named_modules():
        if is_sharded(module):
            found += _units_at(prefix or "the root", module, names, kinds)
    if not any(unit.specs for unit in found):
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to exchange")
    _whole(found)
    _check_one_mesh(found)
    return found


def _whole(units: Sequence[ParamGroup]) -> None:
    """A model that ``replicate`` was called on is HSDP whose shards are the whole: each rank shares with itself."""
    if not hasattr(units[0].inner.mesh_info, "shard_process_group"):
        group = units[0].inner.mesh_info.replicate_process_group
        alone = sibling(group, units[0].inner.device, [group.rank()])
        for unit in units:
            unit.alone = alone


def _units_at(where: str, module: Any, names: dict[int, str], kinds: Any) -> list[ParamGroup]:
    try:
        groups = module._get_fsdp_state()._fsdp_param_groups
    except AttributeError as e:
        raise CommlibError(f"FSDP2 of torch {torch.__version__} is not built as expected ({e}): use 2.13") from e
    if len(groups) > 1:
        raise ValueError(
            f"{where}: one fully_shard() call shards its parameters over several meshes (by shard_placement_fn), and "
            "then PyTorch does not say which of them a communication is for: shard these modules by calls of their own"
        )
    made = []
    for inner in groups:
        order = []
        for p in inner.fsdp_params:
            name = names.get(id(p.sharded_param))
            if name is None:
                raise ValueError(f"{where}: it shards a parameter that the model given does not have: give the root")
            _check(name, p)
            order.append(name)
        trained = [(n, p) for n, p in zip(order, inner.fsdp_params, strict=True) if p.sharded_param.requires_grad]
        specs = {
            n: LayerSpec(n, tuple(p._orig_size), p.sharded_param.dtype, inner.device, kinds.get(n, "other"))
            for n, p in trained
        }
        made.append(ParamGroup(where, inner, module, order, specs))
    return made


def _check(name: str, p: Any) -> None:
    if p.fsdp_placement.dim != 0:
        raise ValueError(
            f"{name} is sharded along dimension {p.fsdp_placement.dim}: codecs and residuals go by rows, so only "
            "Shard(0) can be compressed; leave shard_placement_fn out"
        )
    if p.is_dtensor:
        raise ValueError(
            f"{name} was a DTensor before fully_shard() (tensor parallelism): its residuals could not be saved, "
            "nor moved to other ranks; compression is for parameters that are sharded over data-parallel ranks only"
        )


def _check_one_mesh(units: list[ParamGroup]) -> None:
    meshes = {(id(unit.shard_group), id(unit.replicate_group)): unit for unit in units}
    if len(meshes) > 1:
        a, b, *_ = meshes.values()
        raise ValueError(f"{a.name} and {b.name} are sharded over different meshes: attach to each part by itself")
    if len({unit.replicate_group is None for unit in units}) > 1:
        raise ValueError("some parts are replicated (HSDP) and some are not: attach to each part by itself")
