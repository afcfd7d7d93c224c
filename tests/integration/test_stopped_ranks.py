"""A rank that stands still, even the one that keeps the store, ends the others' training with an error, not a hang."""

from __future__ import annotations

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
    command = [sys.executable, "-m", "tests.support.stopped_ranks", "3", backend, route]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, _, keeper, other, _ = (cell.strip() for cell in done.stdout.split("|"))
    for cell in (keeper, other):
        assert cell.endswith(" RuntimeError" if route == "ddp" else " PeerLost"), done.stdout  # C++ knows no other
        assert cell.count(",") == RANKS - 2
