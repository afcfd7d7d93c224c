"""Which process groups an attached model uses."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlib.collective import Scope
from commlib.errors import PeerLost
from commlib.exchange import BY_ROWS, EXCHANGES
from commlib.exchange.hierarchical import MORE_ROUNDS
from commlib.exchange.item import World
from commlib.exchange.sequencer import Sequencer
from commlib.exchange.valve import Throttle
from commlib.handshake import publish_absence, roll_call
from commlib.hierarchy import Hierarchy
from commlib.layer import LayerSpec
from commlib.pace import RateLimit
from commlib.server.group import ServerGroup
from commlib.servers import Servers


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
    """One more process group of the same backend and deadline. Collective over its ranks only.

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


def for_states(group: Any, device: torch.device) -> Any:
    """One more process group, over which values go from host to host. Collective over its ranks only.

    Args:
        group: whose ranks.
        device: where the gradients are. NCCL would send by way of it, where rank 0 has no room for all ranks' states.
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


def check_limit(limit: RateLimit | None, device: torch.device, timeout: datetime.timedelta) -> None:
    """Whether a limit can be kept.

    Args:
        limit: of rate, or None.
        device: where the gradients are.
        timeout: the process group's.

    Raises:
        ValueError: gradients that leave without the host; or ranks could miss each other for longer than the timeout.
    """
    if limit is None:
        return
    if device.type != "cpu":
        raise ValueError(
            f"limit: gradients on {device} leave without the host (NCCL), which cannot pace them; a limit needs them "
            "on the CPU, over Gloo. Shape the interface instead (tc), or give limit=None"
        )
    burst = limit.seconds(limit.at_once)
    if burst > timeout.total_seconds():
        raise ValueError(
            f"limit: at {limit.mbit:g} Mbit/s one burst of {limit.at_once} bytes takes {burst:.3g} s, longer than the "
            f"process group's time-out of {timeout.total_seconds():g} s: a rank whose turn comes late would be taken "
            "for lost. Give a smaller burst, a higher rate, or init_process_group(timeout=…)"
        )


def waits_on_stream(group: Any, device: torch.device) -> bool:
    """Whether waiting for a work of the group makes the current stream wait, and not the thread (NCCL)."""
    return device.type == "cuda" and bool(group._get_backend(device).name() == "nccl")


def scopes(exchanges: Collection[str], hierarchy: Hierarchy | None) -> list[tuple[Scope, ...]]:
    """For each round of a bucket, which ranks its collectives may be of.

    Under a hierarchy the first is local, as many follow between nodes as the bucket's routes have, and the one after
    these is local again: in any round but the first two it may be either. What goes flat is of all ranks from the first
    round on.

    Args:
        exchanges: all that may come into use; ``dense`` is one of them.
        hierarchy: if there is one.
    """
    if hierarchy is None:
        return [("world",)] * _most_rounds(exchanges)
    between, flat = (_most_rounds(e for e in exchanges if (e in BY_ROWS) is whole) for whole in (False, True))
    found: list[tuple[Scope, ...]] = []
    for i in range(max(between + MORE_ROUNDS, flat)):
        may: dict[Scope, bool] = {
            "inter": 0 < i <= between,
            "local": i != 1 and i < between + MORE_ROUNDS,
            "world": i < flat,
        }
        found.append(tuple(scope for scope, so in may.items() if so))
    return found


def _most_rounds(exchanges: Iterable[str]) -> int:
    return max((EXCHANGES[name].ROUNDS for name in exchanges), default=0)


def limited(lanes: Sequence[Sequence[Scope]]) -> int:
    """How many process groups of these lanes a limit holds up: all but those inside a node."""
    return sum(scope != "local" for lane in lanes for scope in lane)


def join_servers(
    owner: object,
    specs: Sequence[LayerSpec],
    servers: Servers | None,
    group: Any,
    key: str,
    world: World,
    timeout: float,
) -> ServerGroup | None:
    """The way to the servers, if there are some and something goes by them; left when its owner is gone, at the latest.

    Args:
        owner: of it; but it does not keep it alive.
        specs: layers that go by them, or may come to.
        servers, group, key, world, timeout: as :class:`ServerGroup` has them.
    """
    if servers is None or not specs:
        return None
    wait = deadline(group, specs[0].device).total_seconds()
    made = ServerGroup(specs, servers, group, key, world, timeout, wait)
    weakref.finalize(owner, made.close)
    return made


def make_sequencer(
    group: Any,
    key: str,
    world: World,
    device: torch.device,
    lanes: Sequence[Sequence[Scope]],
    throttle: Throttle,
    hierarchy: Hierarchy | None = None,
    servers: ServerGroup | None = None,
) -> Sequencer:
    """A sequencer over ``group``, with one more group of the same ranks for each round after the first.

    Under a hierarchy, with a group for every scope of every round (:func:`scopes`); all ranks make them in this order.
    Under a limit the first round, too, has one more (:mod:`commlib.exchange.valve`); what stays inside a node is not
    limited. Collective over the group's ranks only. NCCL needs one group a scope (:mod:`commlib.exchange.sequencer`).

    Args:
        group: process group of the first round.
        key: of the roll call after a failure, one for each attachment.
        world: this rank.
        device: where the gradients are.
        lanes: of :func:`scopes`.
        throttle: keeps the limit, if there is one.
        hierarchy: nodes, if exchanges have two levels.
        servers: that may sum gradients, if there are any: the first round's.
    """
    inline = waits_on_stream(group, device)
    members: dict[Scope, Sequence[int] | None] = {"world": None}
    if hierarchy is not None:
        members |= {"local": hierarchy.local_ranks, "inter": hierarchy.counterparts}
    needed = {scope for lane in lanes for scope in lane}
    groups: list[dict[Scope, Any]] = []
    for i, lane in enumerate([[scope for scope in members if scope in needed]] if inline else lanes):
        own = i == 0 and hierarchy is None and throttle.limit is None  # the first round goes over the model's own
        made = {scope: group if own else sibling(group, device, members[scope]) for scope in lane}
        groups.append({scope: g if scope == "local" else throttle.through(g) for scope, g in made.items()})

    if servers is not None:
        groups[0]["servers"] = servers

    def lost(label: str, error: BaseException) -> PeerLost:
        who = roll_call(group, key, world, timeout=5.0)
        return PeerLost(f"rank {world.rank} of {world.size} could not exchange {label}: {error}; {who}")

    return Sequencer(groups, lost, inline=inline)
