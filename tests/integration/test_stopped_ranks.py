"""A rank that stands still or is cut off, even the one that keeps the store, ends the training by an error, in time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.stopped_ranks import RANKS, ROUTES

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
    raise_in_time(RANKS - 1, "3", backend, route)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "route"), [("gloo", "onebit"), ("zmq", "factors")])
def test_all_raise_where_a_host_is_cut_off_the_one_that_keeps_the_store_or_not(
    backend: str, route: str, no_lab: str | None
) -> None:
    if no_lab is not None or os.geteuid() != 0:
        pytest.skip(no_lab or "ranks go to their emulated hosts as root only")
    raise_in_time(RANKS, "3", "--cut", backend, route)


def raise_in_time(alive: int, *words: str) -> None:
    command = [sys.executable, "-m", "tests.support.stopped_ranks", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, _, keeper, other, _ = (cell.strip() for cell in done.stdout.split("|"))
    for cell in (keeper, other):
        assert cell.endswith(" RuntimeError" if "ddp" in words else " PeerLost"), done.stdout  # C++ knows no other
        assert cell.count(",") == alive - 1
