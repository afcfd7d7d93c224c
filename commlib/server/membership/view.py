"""View: which shards keep which key, and how that changes without anything being lost. Pure.

A key passes from one shard to another in two views: in the first the new one is among its replicas, and gets to know
what there is to know; in the second it is the owner. So the owner of a view always kept the key in the one before.
Replicas pass likewise: one that has the key stays until as many others have it. So a shard that dies while keys move is
no worse than one that dies at any other time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from commlib.errors import PeerLost
from commlib.server.membership.hash_ring import HashRing, place


@dataclasses.dataclass(frozen=True)
class View:
    """Assignment of keys to shards: their owner, and who keeps replicas.

    Args:
        number: one more with every change.
        places: key → the shard that owns it, and those that keep replicas.
        workers: those that push → the clock at which they began.
    """

    number: int
    places: Mapping[str, tuple[str, ...]]
    workers: Mapping[int, int]


def first(ring: HashRing, workers: Iterable[int], nbytes: Mapping[str, int], copies: int = 1) -> View:
    """Before anything was pushed: everyone has what it keeps."""
    return View(0, place(ring, nbytes, copies), dict.fromkeys(sorted(workers), 0))


def following(
    old: View,
    ring: HashRing,
    workers: Iterable[int],
    nbytes: Mapping[str, int],
    whole: Mapping[str, Collection[str]],
    clock: int,
    copies: int = 1,
    leaving: Collection[str] = (),
) -> View:
    """The next view, as near to ``ring``'s places as can be; the old one, if nothing is to change.

    All shards that live have the old one: only then do they know what they could own.

    Args:
        old: the view of now.
        ring: of the shards that live, new ones among them.
        workers: those that live.
        nbytes: of each key.
        whole: shard → keys that it could own (:attr:`~commlib.server.shard.shard.Shard.whole`).
        clock: the highest of all shards' (:attr:`~commlib.server.shard.shard.Shard.clock`): new workers begin there.
        copies: shards that keep a key.
        leaving: shards that live and are not in the ring: they own what nobody else has yet, and tell who comes next.

    Raises:
        PeerLost: nobody who lives has a key.
    """
    places = {}
    for key, wanted in place(ring, nbytes, copies).items():
        living = {*ring.shards, *leaving}
        having = [s for s in (wanted[0], *wanted, *old.places[key]) if s in living and key in whole.get(s, ())]
        if not having:
            gone = ", ".join(s for s in old.places[key] if s not in living)
            if not gone:
                raise PeerLost(f"{key} was not given its first values, which is the first worker's part: restart")
            raise PeerLost(f"{key} was kept by {gone}, and is lost: more copies, or --restore of a snapshot")
        owner = having[0]
        at = owner, *[s for s in wanted if s != owner][: copies if owner != wanted[0] else copies - 1]
        lacking = len(wanted) - sum(s in having for s in at)  # of those that have it now, that many more are to stay
        places[key] = (*at, *[s for s in having if s not in at][: max(0, lacking)])
    here = {worker: old.workers.get(worker, max(clock, *old.workers.values(), 0)) for worker in sorted(workers)}
    return old if (places, here) == (old.places, old.workers) else View(old.number + 1, places, here)
