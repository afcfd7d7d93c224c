"""A training of many steps keeps the memory that it has after some hundred: on every route, over every backend."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.treated import recipe
from tests.support.soak import ROUTES


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("backend", ["gloo", "zmq"])
@pytest.mark.parametrize(
    ("steps", "route"),
    [
        *((900, route) for route in ("auto", "onebit", "local", "server")),
        *(pytest.param(12_000, route, marks=pytest.mark.long) for route in ROUTES),
    ],
)
def test_later_steps_take_no_more_memory_than_the_first(steps: int, route: str, backend: str) -> None:
    (words,) = recipe("make soak")
    *command, most = words.split()[1:]
    assert steps <= int(most)
    command = [sys.executable, *command, str(steps), backend, route]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"| {backend} | {route} |" in done.stdout
