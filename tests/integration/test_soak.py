"""A training of many steps keeps the memory that it has after some hundred: on every route, over every backend."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.treated import recipe
from tests.support.soak import ROUTES


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("steps", "backend", "route"),
    [
        *((900, *some) for some in (("gloo", "auto"), ("gloo", "server"), ("zmq", "onebit"), ("zmq", "local"))),
        *(
            pytest.param(12_000, backend, route, marks=pytest.mark.long)
            for backend in ("gloo", "zmq")
            for route in ROUTES
        ),
    ],
)
def test_later_steps_take_no_more_memory_than_the_first(steps: int, backend: str, route: str) -> None:
    (words,) = recipe("make soak")
    *command, most = words.split()[1:]
    assert steps <= int(most)
    command = [sys.executable, *command, str(steps), backend, route]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"| {backend} | {route} |" in done.stdout
