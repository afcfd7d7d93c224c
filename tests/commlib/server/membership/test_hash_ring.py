"""Keys and shards: all place them alike, evenly, and move few when a shard comes or goes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.server.membership.hash_ring import HashRing, place

names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6, unique=True)
sizes = st.dictionaries(st.text(max_size=6), st.integers(0, 1000), max_size=40)
KEYS = {f"layer{i}.weight[{j}:{j + 1}]": 2 << 20 for i in range(16) for j in range(8)}


def shards(count: int) -> list[str]:
    return [f"shard {i}" for i in range(count)]


@given(names, st.text(max_size=6))
def test_a_key_prefers_every_shard_once_in_an_order_that_does_not_depend_on_how_they_were_given(
    given: list[str], key: str
) -> None:
    found = list(HashRing(given).preference(key))
    assert sorted(found) == sorted(given)
    assert found == list(HashRing(reversed(given)).preference(key))


def test_another_process_places_keys_alike() -> None:
    code = (
        "from commlib.server.membership.hash_ring import *; "
        "print(place(HashRing('abcd'), dict.fromkeys(map(str, range(50)), 1), 2))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(place(HashRing("abcd"), dict.fromkeys(map(str, range(50)), 1), 2))


@given(names, sizes, st.integers(1, 4), st.floats(0, 1))
def test_every_key_has_its_copies_on_different_shards_and_none_owns_much_more_than_its_share(
    given: list[str], nbytes: dict[str, int], copies: int, slack: float
) -> None:
    placed = place(HashRing(given), nbytes, copies, slack)
    assert placed.keys() == nbytes.keys()
    assert all(len(set(at)) == len(at) == min(copies, len(given)) for at in placed.values())
    share = sum(nbytes.values()) / len(given)
    for shard in given:
        owned = sum(nbytes[key] for key, at in placed.items() if at[0] == shard)
        assert owned <= (1 + slack) * share + max(nbytes.values(), default=0)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_a_hundred_equal_keys_are_shared_evenly(count: int) -> None:
    placed = place(HashRing(shards(count)), KEYS)
    owned = [sum(at[0] == shard for at in placed.values()) for shard in shards(count)]
    assert max(owned) <= 1.05 * len(KEYS) / count + 1


@given(names, st.text(max_size=6), st.text(min_size=9, max_size=9))
def test_preferences_of_the_others_stay_when_a_shard_comes_or_goes(given: list[str], key: str, new: str) -> None:
    ring = HashRing(given)
    with_it = ring.joined(new)
    assert [s for s in with_it.preference(key) if s != new] == list(ring.preference(key))
    assert with_it.left(new).fingerprint == ring.fingerprint != with_it.fingerprint


@pytest.mark.parametrize("count", [3, 4, 8])
def test_few_keys_move_when_a_shard_comes(count: int) -> None:
    before, after = (place(HashRing(shards(n)), KEYS) for n in (count, count + 1))
    moved = sum(before[key][0] != after[key][0] for key in KEYS)
    assert moved <= 2 * len(KEYS) / (count + 1)  # its share, and what others shift to keep their bounds


@pytest.mark.parametrize("names", [[], ["a", "b", "a"]])
def test_no_shards_or_one_twice_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"a ring (needs a shard|is of different shards, got \['a'\] twice)"):
        HashRing(names)
    with pytest.raises(ValueError, match="needs a shard"):
        HashRing("a").left("a")


@pytest.mark.parametrize(("copies", "slack"), [(0, 0.1), (1, -0.1), (1, float("nan"))])
def test_bad_copies_and_slack_are_refused(copies: int, slack: float) -> None:
    with pytest.raises(ValueError, match="one copy or more"):
        place(HashRing("a"), {}, copies, slack)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 20))
def test_a_group_of_shards_has_all_keys_that_are_its_own_and_no_others(groups: int, each: int, count: int) -> None:
    ring = HashRing((f"shard-{100 + i}" for i in range(groups * each)), groups)
    nbytes = {f"w[{i}:{i + 1}]@{g}": 8 for i in range(count) for g in range(groups)}
    for key, at in place(ring, nbytes).items():
        g = int(key.partition("@")[2])
        assert at[0] in [f"shard-{100 + i}" for i in range(g * each, (g + 1) * each)]
    assert set(nbytes) == place(ring, nbytes).keys()
    assert ring.joined("shard-999").left("shard-999").groups == groups
