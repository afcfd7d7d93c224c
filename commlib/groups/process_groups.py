"""Which process groups an attached model uses.

Process groups of torch.distributed that installed packages bring (entry points ``commlib.process_groups``).
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.groups.handshake import publish_absence


def group_of(module: nn.Module, given: Any) -> Any:
    """The group to reduce over: the one given, else the DDP model's, else the default one.

    Raises:
        ValueError: torch.distributed is not initialised; or the given group is not of the DDP model's ranks.
    """
    own: Any = module.process_group if isinstance(module, DistributedDataParallel) else None
    group: Any = next((g for g in (given, own, dist.group.WORLD) if g is not None), None)
    if group is None:
        raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    if own is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(own):
        error = ValueError(
            f"process_group has ranks {dist.get_process_group_ranks(group)}, but the DDP model reduces over "
            f"{dist.get_process_group_ranks(own)}: they must be the same ranks in the same order"
        )
        publish_absence(own, error)
        raise error
    return group


def sibling(group: Any, device: torch.device, some: Sequence[int] | None = None) -> Any:
    """Make another process group of the same backend and deadline. Collective over its ranks only.

    Args:
        group: whose sibling.
        device: where the gradients are.
        some: numbers of ranks in ``group``, in order; by default all.
    """
    members = dist.get_process_group_ranks(group)
    return dist.new_group(
        members if some is None else [members[r] for r in some],
        timeout=deadline(group, device),
        backend=str(dist.get_backend_config(group)),
        use_local_synchronization=True,
    )


def between_hosts(group: Any, device: torch.device) -> Any:
    """Make another process group, over which values go from host to host. Collective over its ranks only.

    Args:
        group: whose ranks.
        device: where the gradients are. NCCL would send by way of it: rank 0 has no room there for all ranks' states,
            and a host that is to read a few values would wait for all that the device has to do before.
    """
    if not waits_on_stream(group, device):
        return sibling(group, device)
    members, timeout = dist.get_process_group_ranks(group), deadline(group, device)
    return dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=True)


def begin_alike(model: nn.Module, group: Any) -> None:
    """The first rank's parameters and buffers, on all. Collective."""
    first = dist.get_process_group_ranks(group)[0]
    for values in [*model.parameters(), *model.buffers()]:
        dist.broadcast(values.detach(), first, group=group)


def deadline(group: Any, device: torch.device) -> datetime.timedelta:
    """How long a collective of the group may take."""
    options = getattr(group._get_backend(device), "options", None)
    found: datetime.timedelta = getattr(options, "_timeout", datetime.timedelta(minutes=30))
    return found


def waits_on_stream(group: Any, device: torch.device) -> bool:
    """Whether waiting for a work of the group makes the current stream wait, and not the thread (NCCL)."""
    if device.type == "cuda":
        return bool(group._get_backend(device).name() == "nccl")
    return bool(getattr(group, "orders_streams", False))  # of a simulated accelerator


GROUP = "commlib.process_groups"


def register() -> None:
    """Makes each known to ``init_process_group`` by its name. What makes them is imported when the first is made."""
    if not dist.is_available():
        return
    for found in entry_points(group=GROUP):
        if found.name not in dist.Backend.backend_list:
            make = functools.partial(_make, found)
            dist.Backend.register_backend(found.name, make, extended_api=True, devices=["cpu", "cuda"])


def _make(found: EntryPoint, about: Any, options: Any) -> Any:
    return found.load()(about, options)
