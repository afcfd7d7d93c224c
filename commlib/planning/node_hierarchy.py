"""Whether an attached model's exchanges have two levels: the ranks are asked where they are, and the plan is fitted."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import Tensor

from commlib.errors import PlanMismatch
from commlib.exchange.hierarchy import Hierarchy, RankPlace, of_mesh, of_places, refuse
from commlib.groups.handshake import difference, share, tell
from commlib.groups.world import World
from commlib.planning.plan import Plan

_KIND = "hierarchy"


def find(given: Any, group: Any, key: str, world: World, timeout: float) -> tuple[Hierarchy | None, str]:
    """The hierarchy that the user has asked for, or None where exchanges stay flat; and a line about it.

    Collective, if it is asked for: ranks tell each other where they are, and from the same answers all of them come to
    the same nodes, or to the same error. A rank that does not ask waits for nobody, but says so.

    Args:
        given: None or False, True (torchrun's environment), or a DeviceMesh of dimensions (nodes, local).
        group: process group.
        key: of this attachment.
        world: this rank.
        timeout: seconds to wait for the others.

    Raises:
        TypeError, ValueError: ``given`` is something else; an environment that is not torchrun's, or is not consistent;
            a mesh that does not fit.
        PlanMismatch: a rank has asked for something else, or failed.
        PeerLost: a rank did not come in time.
    """
    if given is None or given is False:
        tell(group, key, {_KIND: "none"}, world)
        return None, ""
    members = dist.get_process_group_ranks(group)
    mine = _from_environment() if given is True else {_KIND: f"mesh {of_mesh(_table(given), members, world.rank)}"}
    said = share(group, key, mine, world, timeout)
    for other, theirs in enumerate(said):
        if theirs[_KIND] != mine[_KIND]:
            what = difference({_KIND: mine[_KIND]}, {_KIND: theirs[_KIND]}, world.rank, other)
            raise PlanMismatch(f"ranks attached different things: {what}")
    if given is True:
        places = [RankPlace(int(s["node"]), int(s["rank"]), int(s["size"])) for s in said]
        found = of_places(places, world.rank, whole=len(members) == dist.get_world_size())
    else:
        found = of_mesh(_table(given), members, world.rank)
    return (None, f"hierarchy: {found.flat()}") if found.flat() else (found, found.about())


def fit(plan: Plan, hierarchy: Hierarchy | None, about: str) -> Plan:
    """The plan with what there is to say of its levels.

    Raises:
        ValueError: a route that cannot be taken under a hierarchy.
    """
    if hierarchy is None:
        return plan.noted(about)
    for p in plan:
        reason = refuse(p.route, p.spec) or refuse(p.dense, p.spec)
        if reason:
            raise ValueError(
                f"{p.spec.name} by {p.route} cannot be taken under a hierarchy: {reason}; or leave hierarchy out"
            )
    return plan.noted(about, local=hierarchy.local.size)


def _from_environment() -> dict[str, str]:
    place = RankPlace.of(os.environ)
    return {_KIND: "torchrun's", "node": str(place.node), "rank": str(place.rank), "size": str(place.size)}


def _table(mesh: Any) -> list[list[int]]:
    """The ranks of a DeviceMesh, a row a node."""
    ranks = getattr(mesh, "mesh", None)
    if not isinstance(ranks, Tensor):
        raise TypeError(f"hierarchy must be None, True or a DeviceMesh of dimensions (nodes, local), got {mesh!r}")
    if ranks.dim() != 2:
        raise ValueError(
            f"a hierarchy's mesh has the dimensions (nodes, local), and this one has {ranks.dim()}, of "
            f"{'x'.join(map(str, ranks.shape))}: init_device_mesh('cpu', (nodes, local))"
        )
    table: list[list[int]] = ranks.tolist()
    return table
