"""Views: no key has fewer that keep it than before, whoever comes, leaves or dies, and in whatever moment."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.errors import PeerLost
from commlib.server.membership.hash_ring import HashRing, place
from commlib.server.membership.view import View, first, following
from tests.support.tiers import examples

KEYS = {f"w[{i}]": 8 + i for i in range(5)}


class Shards:
    """Shards by what they have whole, through views in which each gets what it is to keep, some time."""

    def __init__(self, n: int, copies: int, rng: random.Random) -> None:
        self.copies, self.rng, self.leaving = copies, rng, set[str]()
        self.ring = HashRing(f"s{i}" for i in range(n))
        self.view = first(self.ring, [0], KEYS, copies)
        self.whole = {s: {k for k, at in self.view.places.items() if s in at} for s in self.ring.shards}

    def keepers(self, key: str) -> set[str]:
        """Those that have a key whole, and are to keep it."""
        return {s for s in self.view.places[key] if key in self.whole.get(s, ())}

    def change(self) -> bool:
        """The next view; whether there is one. What a shard is not to keep any more it forgets."""
        reported = {s: frozenset(keys) for s, keys in self.whole.items()}
        new = following(self.view, self.ring, [0], KEYS, reported, 0, self.copies, self.leaving)
        changed, self.view = new is not self.view, new
        for shard, keys in self.whole.items():
            keys &= {k for k, at in new.places.items() if shard in at}
        return changed

    def adopt(self, likely: float = 1.0) -> None:
        """Shards get what they are to keep and have not, or some of it."""
        for key, at in self.view.places.items():
            for shard in at:
                if self.keepers(key) and self.rng.random() < likely:
                    self.whole[shard].add(key)

    def happens(self, name: str) -> None:
        """A shard comes, or one is to leave."""
        if self.rng.random() < 0.5:
            self.ring = self.ring.joined(name)
            self.whole[name] = set()
        elif len(self.ring.shards) > 1:
            self.leaving.add(leaves := self.rng.choice(self.ring.shards))
            self.ring = self.ring.left(leaves)


@settings(max_examples=examples(300))
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 1 << 32))
def test_as_many_keep_each_key_as_did_and_in_the_end_those_that_the_ring_says(n: int, copies: int, seed: int) -> None:
    rng = random.Random(seed)
    shards = Shards(n, copies, rng)
    for step in range(6):
        shards.happens(f"new{step}")
        least = min(copies, len(shards.ring.shards))
        for _ in range(rng.randrange(4)):
            before = {key: len(shards.keepers(key)) for key in KEYS}
            shards.change()
            for key in KEYS:
                assert len(shards.keepers(key)) >= min(before[key], least), f"{key} of {shards.view}"
            shards.adopt(0.5)
    rounds = 0
    while shards.change() or shards.view.places != place(shards.ring, KEYS, copies):
        shards.adopt()
        rounds += 1
        assert rounds < 5, f"it comes to no end: {shards.view}"


@settings(max_examples=examples(100))
@given(st.integers(2, 4), st.integers(0, 1 << 32))
def test_with_two_copies_any_shard_may_die_while_keys_move_to_another(n: int, seed: int) -> None:
    rng = random.Random(seed)
    shards = Shards(n, 2, rng)
    shards.happens("new")
    for _ in range(rng.randrange(3)):
        shards.change()
        shards.adopt(0.3)
    dead = rng.choice(sorted(shards.whole))
    del shards.whole[dead]
    shards.leaving.discard(dead)
    if dead in shards.ring.shards and len(shards.ring.shards) > 1:
        shards.ring = shards.ring.left(dead)
    if shards.whole.keys() & set(shards.ring.shards):
        shards.change()  # raises if a key is lost
        assert all(shards.keepers(key) for key in KEYS)


def test_a_key_that_nobody_has_any_more_is_named_with_who_kept_it_and_what_to_do() -> None:
    ring = HashRing("ab")
    view = first(ring, [0], KEYS)
    lost = next(key for key, at in view.places.items() if at == ("a",))
    with pytest.raises(PeerLost, match=r"kept by a, and is lost: more copies, or --restore") as e:
        following(view, ring.left("a"), [0], KEYS, {"b": [k for k, at in view.places.items() if at == ("b",)]}, 0)
    assert lost.partition("[")[0] in str(e.value)


def test_workers_keep_the_clock_at_which_they_began_and_new_ones_begin_at_the_highest() -> None:
    ring = HashRing("ab")
    view = View(3, place(ring, KEYS), {0: 0, 1: 5})
    whole = {s: [k for k, at in view.places.items() if s in at] for s in ring.shards}
    assert following(view, ring, [1, 0], KEYS, whole, 7) is view
    assert following(view, ring, [1, 2], KEYS, whole, 7) == View(4, view.places, {1: 5, 2: 7})
