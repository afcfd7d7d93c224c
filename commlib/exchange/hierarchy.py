"""Nodes, and the ranks on them: who is local to a rank, who are its counterparts, and which rows it exchanges.

All pure: from what the ranks have said of themselves, or from a mesh, every rank computes the same nodes or raises the
same error. ``commlib.planning.node_hierarchy`` asks the ranks; ``commlib.exchange.two_level`` moves the gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from commlib.codecs.base import Compressor, LayerSpec
from commlib.codecs.slots import NODE
from commlib.exchange.base import Routed
from commlib.exchange.layer_task import Stripe
from commlib.exchange.registry import BY_ROWS
from commlib.exchange.scatter_gather import stripes
from commlib.groups.world import World

_NEEDED = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # what torchrun sets for every rank
_OTHERWISE = "or give the nodes as a 2-D mesh: hierarchy=init_device_mesh('cpu', (nodes, local))"
_CARRIED = ("dense", "gather", "scatter_gather")


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """Where a rank runs, as torchrun says it.

    Args:
        node: GROUP_RANK.
        rank: LOCAL_RANK, its number on the node.
        size: LOCAL_WORLD_SIZE, of all ranks of the job on the node.
    """

    node: int
    rank: int
    size: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RankPlace:
        """Read a rank's place from environment variables.

        Raises:
            ValueError: one is missing or no whole number ≥ 0.
        """
        missing = [name for name in _NEEDED if name not in environment]
        if missing:
            raise ValueError(
                f"hierarchy=True needs {', '.join(missing)}, which torchrun sets: start by it, {_OTHERWISE}"
            )
        bad = [f"{n}={environment[n]!r}" for n in _NEEDED if not environment[n].isdecimal()]
        if bad:
            raise ValueError(f"{', '.join(bad)} in the environment: must be whole numbers ≥ 0, as torchrun sets them")
        return cls(*(int(environment[name]) for name in _NEEDED))


@dataclasses.dataclass(frozen=True)
class HierarchyShare:
    """The rows of a layer that a rank exchanges with others.

    Attributes:
        world: those others, and which of them it is.
        spec: the rows.
        start: the first one.
        prefix: of the slots that the codec keeps for them.
    """

    world: World
    spec: LayerSpec
    start: int = 0
    prefix: str = ""


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """Nodes of equally many ranks.

    Args:
        nodes: the group's ranks, node by node, each in local order; all of them, each once.
        rank: this one.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def node(self) -> int:
        """Index of the node that this rank is on."""
        return next(n for n, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """All ranks of this one's node."""
        return self.nodes[self.node]

    @property
    def counterparts(self) -> tuple[int, ...]:
        """The rank of the same local number on every node."""
        place = self.local_ranks.index(self.rank)
        return tuple(ranks[place] for ranks in self.nodes)

    @property
    def local(self) -> World:
        """This rank among those of its node."""
        return World(self.local_ranks.index(self.rank), len(self.local_ranks))

    @property
    def inter(self) -> World:
        """This rank among its counterparts: the node, and how many there are."""
        return World(self.node, len(self.nodes))

    def cut(self, codec: Compressor, spec: LayerSpec) -> tuple[Stripe, ...]:
        """The rows of a layer that each local rank exchanges between nodes; a scalar is one row."""
        return stripes(codec, spec, self.local.size)

    def share(self, codec: Compressor, spec: LayerSpec) -> HierarchyShare:
        """This rank's rows of a layer. ``codec`` is the one planned, in every step: its boundaries are kept."""
        stripe = self.cut(codec, spec)[self.local.rank]
        return HierarchyShare(self.inter, stripe.spec, stripe.start, NODE)

    def flat(self) -> str:
        """Why two levels would be no better than one, or an empty text."""
        if len(self.nodes) == 1:
            return f"flat: all ranks ({self.local.size}) are on one node"
        return f"flat: one rank on each of {len(self.nodes)} nodes" if self.local.size == 1 else ""

    def about(self) -> str:
        """Number of nodes and ranks of each, in words."""
        return f"dense inside a node of {self.local.size}, routes between {len(self.nodes)} nodes"

    def __str__(self) -> str:
        return " ".join(",".join(map(str, ranks)) for ranks in self.nodes)


def share(route: Routed, spec: LayerSpec, world: World, hierarchy: Hierarchy | None) -> HierarchyShare:
    """Rows of a layer that a rank exchanges, and with whom: all of it with all ranks, unless a hierarchy shares it
    out."""
    return HierarchyShare(world, spec) if hierarchy is None or route.by_rows else hierarchy.share(route.codec, spec)


def of_places(places: Sequence[RankPlace], rank: int, *, whole: bool) -> Hierarchy:
    """Make the hierarchy of ranks that are at these places.

    Args:
        places: one a rank.
        rank: this one.
        whole: whether these are all ranks of the job. (A model on some of them may use a part of each node.)

    Raises:
        ValueError: they contradict each other, or nodes have unequally many of the group's ranks.
    """
    nodes: dict[int, dict[int, int]] = {}
    for r, place in enumerate(places):
        there = nodes.setdefault(place.node, {})
        if place.rank >= place.size:
            raise ValueError(_odd(f"rank {r} has LOCAL_RANK {place.rank} of LOCAL_WORLD_SIZE {place.size}"))
        if place.rank in there:
            what = f"ranks {there[place.rank]} and {r} both say LOCAL_RANK {place.rank} on node {place.node}"
            raise ValueError(_odd(what))
        first = next(iter(there.values()), r)
        if places[first].size != place.size:
            what = f"ranks {first} and {r} are on node {place.node}, with LOCAL_WORLD_SIZE"
            raise ValueError(_odd(f"{what} {places[first].size} and {place.size}"))
        there[place.rank] = r
    counts = {node: len(there) for node, there in sorted(nodes.items())}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{n} on node {node}" for node, n in counts.items())
        raise ValueError(
            f"a hierarchy needs equally many ranks on each node, and there are {shown}: leave hierarchy out"
        )
    for node, there in nodes.items():
        size = places[next(iter(there.values()))].size
        if whole and len(there) != size:
            raise ValueError(_odd(f"node {node} has {len(there)} of the ranks, and they say LOCAL_WORLD_SIZE {size}"))
    found = (tuple(there[place] for place in sorted(there)) for _, there in sorted(nodes.items()))
    return Hierarchy(tuple(found), rank)


def of_mesh(mesh: Sequence[Sequence[int]], members: Sequence[int], rank: int) -> Hierarchy:
    """Make a hierarchy from a table of global ranks, a row a node.

    Args:
        mesh: the table; rows are equally long.
        members: the group's ranks by their global numbers.
        rank: this one's number in the group.

    Raises:
        ValueError: the table is not of exactly these ranks.
    """
    named = [r for row in mesh for r in row]
    if sorted(named) != sorted(members):
        raise ValueError(
            f"the mesh has ranks {_list(named)}, and the model is reduced over {_list(members)}: "
            "a hierarchy's mesh has exactly these, a row for each node"
        )
    number = {member: i for i, member in enumerate(members)}
    return Hierarchy(tuple(tuple(number[r] for r in row) for row in mesh), rank)


def refuse(route: Routed, spec: LayerSpec) -> str | None:
    """Why a route cannot be taken under a hierarchy, or None."""
    if route.by_rows:
        return None
    if spec.sparse:
        return "its gradient is sparse, and does not go by two levels yet; leave hierarchy out"
    if route.exchange not in _CARRIED:
        known = ", ".join([*_CARRIED, *sorted(BY_ROWS)])
        return f"it does not work on a part of a layer; under a hierarchy {known} do"
    kept = [k for k, s in route.codec.slots(spec).items() if s.shape != spec.shape or s.role == "replicated"]
    if kept:
        return (
            f"its {', '.join(kept)} cannot be shared out by rows; take a codec that keeps a residual only, or nothing"
        )
    return None


def _odd(what: str) -> str:
    return f"the ranks do not add up to nodes: {what}. Start all of them by torchrun, {_OTHERWISE}"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks))) or "none"
