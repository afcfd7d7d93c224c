"""Which process groups an attached model uses."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.errors import PeerLost
from commlib.exchange.item import World
from commlib.exchange.sequencer import Sequencer
from commlib.handshake import publish_absence, roll_call


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


def sibling(group: Any, device: torch.device) -> Any:
    """One more process group of the same ranks, backend and deadline. Collective over these ranks only."""
    backend = group._get_backend(device)
    timeout = getattr(getattr(backend, "options", None), "_timeout", datetime.timedelta(minutes=30))
    return dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout,
        backend=str(dist.get_backend_config(group)),
        use_local_synchronization=True,
    )


def waits_on_stream(group: Any, device: torch.device) -> bool:
    """Whether waiting for a work of the group makes the current stream wait, and not the thread (NCCL)."""
    return device.type == "cuda" and bool(group._get_backend(device).name() == "nccl")


def make_sequencer(group: Any, key: str, world: World, device: torch.device, rounds: int) -> Sequencer:
    """A sequencer over ``group``, with one more group of the same ranks for each round after the first.

    Collective over the group's ranks only. NCCL needs no further groups: see :mod:`commlib.exchange.sequencer`.

    Args:
        group: process group of the first round.
        key: of the roll call after a failure, one for each attachment.
        world: this rank.
        device: where the gradients are.
        rounds: the most rounds any route has.
    """
    inline = waits_on_stream(group, device)
    groups = [group]
    if not inline:
        groups += [sibling(group, device) for _ in range(rounds - 1)]

    def lost(label: str, error: BaseException) -> PeerLost:
        who = roll_call(group, key, world, timeout=5.0)
        return PeerLost(f"rank {world.rank} of {world.size} could not exchange {label}: {error}; {who}")

    return Sequencer(groups, world.size, lost, inline=inline)
