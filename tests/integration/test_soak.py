"""A training of many steps keeps the memory that it has after some hundred: on every route, over every backend."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.soak import ROUTES


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("backend", ["gloo", "zmq"])
@pytest.mark.parametrize("route", ROUTES)
def test_twelve_thousand_steps_take_no_more_memory_than_five_hundred(route: str, backend: str) -> None:
    command = [sys.executable, "-m", "tests.support.soak", "12000", backend, route]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"| {backend} | {route} |" in done.stdout
