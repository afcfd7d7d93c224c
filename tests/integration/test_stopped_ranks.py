"""A rank that stands still or is cut off, even the one that keeps the store, ends the training by an error, in time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import forked_ranks
from tests.support.stopped_ranks import RANKS, ROUTES, told

ALL = [(backend, route) for backend in ("gloo", "zmq") for route in ROUTES if (backend, route) != ("gloo", "ddp")]
IN_THE_FAST_TIER = {("gloo", "onebit"), ("zmq", "ddp"), ("zmq", "none")}


@pytest.mark.parametrize(
    ("backend", "route"),
    [
        pytest.param(backend, route, marks=() if (backend, route) in IN_THE_FAST_TIER else pytest.mark.full)
        for backend, route in ALL
    ],
)
def test_all_others_raise_whether_the_stopped_rank_keeps_the_store_or_not(backend: str, route: str) -> None:
    raise_in_time(RANKS - 1, backend, route)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "route"), [("gloo", "onebit"), ("zmq", "factors")])
def test_all_raise_where_a_host_is_cut_off_the_one_that_keeps_the_store_or_not(
    backend: str, route: str, no_lab: str | None
) -> None:
    if no_lab is not None or os.geteuid() != 0:
        pytest.skip(no_lab or "ranks go to their emulated hosts as root only")
    raise_in_time(RANKS, backend, route, cut=True)


@pytest.mark.full
def test_the_command_prints_a_row_for_each_route() -> None:
    command = [sys.executable, "-m", "tests.support.stopped_ranks", "3", "gloo", "ddp", "onebit"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in done.stdout.splitlines()]
    assert [row[:2] for row in rows] == [["gloo", "ddp"], ["gloo", "onebit"]]
    for _, _, keeper, other in rows:
        assert keeper.count(",") == other.count(",") == RANKS - 2
    assert all(cell.endswith(" PeerLost") for cell in rows[1][2:])


def raise_in_time(alive: int, backend: str, route: str, *, cut: bool = False) -> None:
    for lost in (0, RANKS - 1):
        with forked_ranks.context().Pool(1) as pool:
            found = pool.apply_async(told, (route, backend, lost, 3.0, 63.0), {"cut": cut}).get(240)
        assert len(found) == alive, found
        for said in found.values():
            assert said["error"] == ("RuntimeError" if route == "ddp" else "PeerLost"), found  # C++ knows no other
            assert said["text"].count(" roll call") <= 1, said["text"]  # or who gave up would hold the others up
