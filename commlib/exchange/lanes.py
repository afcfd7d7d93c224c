"""The process groups that a model's buckets go over: which there must be, and where they come from.

A process group costs a rendezvous and sockets, and torch names groups of the same ranks by how many groups there
are: one that was destroyed would share its name, and what is left of it in the store, with the next. So groups are not
destroyed. What was detached gives its own back, and the next attachment of the same parent takes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal

import torch

from commlib.errors import PeerLost
from commlib.exchange.collectives import Scope
from commlib.exchange.hierarchy import Hierarchy
from commlib.exchange.registry import BY_ROWS, EXCHANGES
from commlib.exchange.sequencer import Sequencer
from commlib.exchange.throttled_group import Throttle
from commlib.exchange.two_level import MORE_ROUNDS
from commlib.groups.handshake import explained
from commlib.groups.process_groups import between_hosts, sibling, waits_on_stream
from commlib.groups.world import World

Members = tuple[int, ...] | Literal["hosts"] | None
_spare: weakref.WeakKeyDictionary[Any, dict[Members, list[Any]]] = weakref.WeakKeyDictionary()


class Siblings:
    """Process groups beside another one, for one attachment.

    All ranks take and give back alike: so what is spare is the same on all of a group's ranks, in the same order.

    Args:
        group: whose siblings.
        device: where the gradients are.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._taken: list[tuple[Members, Any]] = []

    def take(self, some: Sequence[int] | None = None) -> Any:
        """Process group that carries nothing else: a spare or a new one. As
        :func:`commlib.groups.process_groups.sibling`, collective."""
        return self._take(None if some is None else tuple(some), lambda: sibling(self._group, self._device, some))

    def take_hosts(self) -> Any:
        """Process group of all ranks' hosts (:func:`commlib.groups.process_groups.between_hosts`); collective."""
        return self._take("hosts", lambda: between_hosts(self._group, self._device))

    def _take(self, members: Members, make: Callable[[], Any]) -> Any:
        spare = self._spare(members)
        found = spare.pop() if spare else make()
        self._taken.append((members, found))
        return found

    def give_back(self) -> None:
        """All of them, once nothing is under way on them on any rank."""
        while self._taken:
            members, group = self._taken.pop()
            self._spare(members).append(group)

    def _spare(self, members: Members) -> list[Any]:
        return _spare.setdefault(self._group, {}).setdefault(members, [])


def scopes(exchanges: Collection[str], hierarchy: Hierarchy | None) -> list[tuple[Scope, ...]]:
    """Scopes for each round of a bucket: which ranks its collectives may be of.

    Where rows may go, their words are of all hosts, in the first round. Under a hierarchy the first is local, as many
    follow between nodes as the bucket's routes have, and the one after these is local again: in any round but the first
    two it may be either. What goes flat is of all ranks from the first round on.

    Args:
        exchanges: all that may come into use; ``dense`` is one of them.
        hierarchy: if there is one.
    """
    words: tuple[Scope, ...] = ("hosts",) if any(name in BY_ROWS for name in exchanges) else ()
    if hierarchy is None:
        later: list[tuple[Scope, ...]] = [("world",)] * (_most_rounds(exchanges) - 1)
        return [("world", *words), *later]
    between, flat = (_most_rounds(e for e in exchanges if (e in BY_ROWS) is whole) for whole in (False, True))
    found: list[tuple[Scope, ...]] = []
    for i in range(max(between + MORE_ROUNDS, flat)):
        may: dict[Scope, bool] = {
            "inter": 0 < i <= between,
            "local": i != 1 and i < between + MORE_ROUNDS,
            "world": i < flat,
        }
        found.append(tuple(scope for scope, so in may.items() if so) + (() if i else words))
    return found


def _most_rounds(exchanges: Iterable[str]) -> int:
    return max((EXCHANGES[name].ROUNDS for name in exchanges), default=0)


def make_sequencer(group: Any, key: str, world: World, device: torch.device, *, side: int = 1) -> Sequencer:
    """A sequencer that has no process groups yet: see :func:`lay`.

    Args:
        group: the model's process group.
        key: of the roll call after a failure, one for each attachment.
        world: this rank.
        device: where the gradients are.
        side: streams that buckets take in turn over NCCL; 1 where exchanges have several scopes.
    """

    def lost(label: str, error: BaseException) -> PeerLost:
        why = explained(group, key, world, error)
        return PeerLost(f"rank {world.rank} of {world.size} could not exchange {label}: {why}")

    return Sequencer([], lost, inline=waits_on_stream(group, device), side=side)


def lay(
    sequencer: Sequencer,
    lanes: Sequence[Sequence[Scope]],
    group: Any,
    siblings: Siblings,
    throttle: Throttle,
    hierarchy: Hierarchy | None = None,
    servers: object | None = None,
) -> None:
    """Gives a sequencer what it lacks: ``group`` for the first round, and one more of the same ranks for each after it.

    Under a hierarchy, a group for every scope of every round (:func:`scopes`); all ranks make them in this order. Under
    a limit the first round, too, has one more (:mod:`commlib.exchange.throttled_group`); what stays inside a node is
    not limited. Collective over the group's ranks only. NCCL needs one group a scope
    (:mod:`commlib.exchange.sequencer`), and one of the hosts where rows may go; elsewhere their words go with the
    first round.

    Args:
        sequencer: without a bucket under way.
        lanes: of :func:`scopes`.
        group: process group of the first round.
        siblings: of that.
        throttle: keeps the limit, if there is one.
        hierarchy: nodes, if exchanges have two levels.
        servers: that may sum gradients, if there are any: the first round's.
    """
    members: dict[Scope, Sequence[int] | None] = {"world": None}
    if hierarchy is not None:
        members |= {"local": hierarchy.local_ranks, "inter": hierarchy.counterparts}
    needed = {scope for lane in lanes for scope in lane}
    order: tuple[Scope, ...] = ("world", "local", "inter", "hosts")
    wanted = [[scope for scope in order if scope in needed]] if sequencer.inline else lanes
    more: list[dict[Scope, Any]] = []
    for i, (lane, has) in enumerate(zip_longest(wanted, sequencer.tracks.scopes, fillvalue=())):
        own = i == 0 and hierarchy is None and throttle.limit is None  # the first round goes over the model's own
        lacks = [scope for scope in lane if scope not in has]
        made = {scope: group if own else siblings.take(members[scope]) for scope in lacks if scope != "hosts"}
        more.append({scope: g if scope == "local" else throttle.through(g) for scope, g in made.items()})
        if "hosts" in lacks:
            words = siblings.take_hosts() if sequencer.inline else (more[0] | sequencer.tracks.first())["world"]
            more[0]["hosts"] = words
    if servers is not None:
        more[0]["servers"] = servers
    sequencer.extend(more)
