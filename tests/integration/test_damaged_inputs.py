"""Whatever reads bytes or text from outside: damaged inputs are read, or refused by name, in little time and memory."""

from __future__ import annotations

import random
import time

import pytest

from tests.support.fuzz import Reader, measured, readers, survive
from tests.support.tiers import full

NAMES = ["frame", "message", "values", "snapshot", "job", "plan", "key", "allowed", "codec", "route"]


def damage(reader: Reader, count: int, seed: int) -> int:
    rng = random.Random(seed)
    with measured():
        return sum(survive(reader, rng) for _ in range(count))


def test_all_readers_are_here() -> None:
    assert list(readers()) == NAMES


@pytest.mark.parametrize(("count", "seed"), [(200, 1), *full((5_000, None))])
@pytest.mark.parametrize("name", NAMES)
def test_each_is_read_or_refused_by_name(name: str, count: int, seed: int | None) -> None:
    seed = time.time_ns() if seed is None else seed
    print(f"seed {seed}")
    assert damage(readers()[name], count, seed) < count
