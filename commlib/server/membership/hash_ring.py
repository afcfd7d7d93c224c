"""Which shards keep which keys: consistent hashing with virtual nodes and bounded loads. Pure.

Every shard stands at many places of a ring, and a key's shards are those that follow its own place, each once: its
*preference*, the same for all who know the shards' names. The first is its owner and the next have replicas, unless it
is full: then the ones after it. (Karger et al., STOC 1997; bounded loads: Mirrokni, Thorup, Zadimoghaddam, SODA 2018.)

Chance alone leaves one of four shards with a quarter more than its share of a hundred keys, and a step waits for the
fullest.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping

from commlib.server.job.chunks import group_of

_PLACES = 64  # of a shard: preferences are uneven by an eighth or so


class HashRing:
    """Consistent hash ring of shards, immutable.

    Args:
        shards: their names, each once.
        groups: of shards, each of which keeps the keys that end with its number
            (:func:`~commlib.server.job.chunks.group_of`): the first of the names are group 0, and so on.

    Raises:
        ValueError: there are none, or one is named twice.
    """

    def __init__(self, shards: Iterable[str], groups: int = 1) -> None:
        names = list(shards)
        self.shards = tuple(sorted(set(names)))
        if not names or len(self.shards) < len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ValueError(f"a ring is of different shards, got {twice} twice" if names else "a ring needs a shard")
        self.groups = groups
        self._places = sorted((_place(f"{name}#{i}"), name) for name in self.shards for i in range(_PLACES))

    @property
    def fingerprint(self) -> str:
        """The same for rings of the same shards, and for no others."""
        return hashlib.blake2b("\n".join(self.shards).encode(), digest_size=8).hexdigest()

    def preference(self, key: str) -> Iterator[str]:
        """All shards of the key's group, nearest first."""
        start = bisect.bisect(self._places, (_place(key), ""))
        own, seen = self._group(key), set[str]()
        for _, name in itertools.chain(self._places[start:], self._places[:start]):
            if name in own and name not in seen:
                seen.add(name)
                yield name

    def _group(self, key: str) -> tuple[str, ...]:
        if self.groups == 1:
            return self.shards
        g, n = group_of(key), len(self.shards)
        return self.shards[g * n // self.groups : (g + 1) * n // self.groups]

    def joined(self, shard: str) -> HashRing:
        """Ring with one more shard."""
        return HashRing([*self.shards, shard], self.groups)

    def left(self, shard: str) -> HashRing:
        """Ring without this shard."""
        return HashRing((name for name in self.shards if name != shard), self.groups)


def place(
    ring: HashRing, nbytes: Mapping[str, int], copies: int = 1, slack: float = 0.05
) -> dict[str, tuple[str, ...]]:
    """Key → its owner and the shards of its replicas, for all who have the same ring and keys.

    Large keys are placed first. No shard owns more than (1 + slack) of its share, and one key.

    Args:
        ring: of the shards.
        nbytes: of each key.
        copies: shards that keep a key, its owner included; no more than there are.
        slack: what a shard may have above its share.

    Raises:
        ValueError: fewer than one copy, or a negative slack.
    """
    if copies < 1 or not slack >= 0:
        raise ValueError(f"a key has one copy or more, and a shard some slack or none; got {copies} and {slack}")
    room = (1 + slack) * sum(nbytes.values()) / len(ring.shards)
    owned = dict.fromkeys(ring.shards, 0)
    placed: dict[str, tuple[str, ...]] = {}
    for key in sorted(nbytes, key=lambda k: (-nbytes[k], k)):
        liked = list(ring.preference(key))
        owner = next((s for s in liked if owned[s] + nbytes[key] <= room), min(liked, key=lambda s: owned[s]))
        owned[owner] += nbytes[key]
        placed[key] = (owner, *[s for s in liked if s != owner][: copies - 1])
    return placed


def _place(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
