"""``attach``: the one line on a DDP training loop."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, overload

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.ddp.hook_slot import check_free
from commlib.ddp.state import HookState
from commlib.fsdp.param_groups import is_sharded
from commlib.groups.handshake import publish_absence
from commlib.planning.plan import Plan
from commlib.planning.policy import Exact, Policy
from commlib.planning.route import Rules

if TYPE_CHECKING:
    from commlib.fsdp.state import ShardedState

_EXACT = Exact()


@overload
def attach(model: DistributedDataParallel, compressor: Rules | Policy | Plan = ..., **options: Any) -> HookState: ...
@overload
def attach(model: nn.Module, compressor: Rules | Policy | Plan = ..., **options: Any) -> ShardedState: ...
def attach(model: Any, compressor: Rules | Policy | Plan = _EXACT, **options: Any) -> HookState | ShardedState:
    """Compresses the gradient exchange of a DDP model from now on, or that of a model that is sharded. Collective.

    Args:
        model: a DistributedDataParallel without a communication hook, or one that was detached; or what
            ``fully_shard`` (FSDP2) was called on, the root: then see :class:`commlib.fsdp.state.ShardedState`.
        compressor: see :class:`HookState`. By default commlib chooses, layer by layer, the fastest route that loses
            nothing on this link; ``"none"`` is dense throughout, and equals plain DDP bit for bit.
        **options: those of :class:`HookState`.

    Returns:
        The hook's state: ``plan``, ``stats()``, ``trace()``, ``log_to()``, ``state_dict()``, ``load_state_dict()``.

    Raises:
        TypeError: neither a DDP model nor one of FSDP2.
        ValueError: commlib is attached already, or a hook of somebody else is registered; and whatever
            :class:`HookState` or :class:`~commlib.fsdp.state.ShardedState` raises.
    """
    if is_sharded(model):
        sharded: Any = importlib.import_module("commlib.fsdp.state")  # not before: FSDP2 takes a while to import
        found: ShardedState = sharded.ShardedState(model, compressor, **options)
        return found
    ddp = model
    try:
        check_free(ddp)
    except (TypeError, ValueError) as e:
        publish_absence(getattr(ddp, "process_group", options.get("process_group") or dist.group.WORLD), e)
        raise
    state = HookState(ddp, compressor, **options)
    state.follow(ddp)
    return state
