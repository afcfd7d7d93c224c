"""When a worker pushes and fetches: as its rule has it, and with a cache only what is too old."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.server.job.consistency import RULES, make
from commlib.server.worker.sync_policy import SyncPolicy


def course(spec: str, steps: int) -> tuple[str, str]:
    """Steps that push, and steps that fetch."""
    rhythm, pushes, fetches = SyncPolicy(make(spec)), "", ""
    for step in range(steps):
        pushes += "-P"[rhythm.pushes]
        fetches += "-F"[rhythm.fetches("w", step)]
        rhythm.end_step()
    return pushes, fetches


@pytest.mark.parametrize("spec", [name for name in RULES if name not in ("wsp", "downpour")])
def test_most_rules_push_and_fetch_in_every_step(spec: str) -> None:
    assert course(spec, 4) == ("PPPP", "FFFF")
    assert not SyncPolicy(make(spec)).alone
    assert not SyncPolicy(make(spec)).accrues


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("downpour:push=3,fetch=2", ("--P--P--", "-F-F-F-F")),
        ("downpour:fetch=4", ("PPPPPPPP", "---F---F")),
        ("wsp:distance=1,local=3", ("---P---P", "---F---F")),
    ],
)
def test_downpour_and_waves_push_and_fetch_now_and_then(spec: str, expected: tuple[str, str]) -> None:
    assert course(spec, 8) == expected
    assert SyncPolicy(make(spec)).alone


@given(st.integers(0, 5), st.integers(0, 20), st.dictionaries(st.integers(0, 3), st.integers(0, 20), max_size=4))
def test_with_a_cache_it_fetches_what_lacks_more_of_another_than_it_may(
    bound: int, clock: int, included: dict[int, int]
) -> None:
    rhythm = SyncPolicy(make(f"ssp:{bound}"), worker=0, cache=True)
    assert rhythm.fetches("w", clock)
    rhythm.took("w", included)
    old = any(clock - n > bound for worker, n in included.items() if worker != 0)
    assert rhythm.fetches("w", clock) == (old or bound == 0)
    assert rhythm.fetches("another", clock)
