"""A script that just ends, with attached models alive, ends with 0: it is not taken for a failed one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.docs.treated import recipe
from tests.support.clean_exits import KINDS, LOST, ROUTES
from tests.support.tiers import full

pytestmark = pytest.mark.timeout(2500)
RUNS = 2
TOGETHER = 4  # routes of one process, which imports PyTorch and forks all their ranks


def together(*routes: str) -> list[Any]:
    return full(*((routes[i : i + TOGETHER],) for i in range(0, len(routes), TOGETHER)))


def ends_well(routes: tuple[str, ...]) -> None:
    (words,) = recipe("make exits")
    *command, most = words.split()[1:]
    assert int(most) >= RUNS
    done = subprocess.run(
        [sys.executable, *command, *routes, str(RUNS)],
        capture_output=True,
        text=True,
        timeout=600 * len(routes),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for route in routes:
        assert f"{route}: 0 of" in done.stdout


@pytest.mark.parametrize("routes", together(*(r for r in ROUTES if r != "ddp")), ids=" ".join)
def test_every_process_ends_with_0(routes: tuple[str, ...]) -> None:
    ends_well(routes)


@pytest.mark.parametrize("routes", together(*(f"{kind}:{r}" for kind in KINDS for r in LOST)), ids=" ".join)
def test_who_has_lost_a_rank_ends_as_a_script_does_with_the_error_or_after_it(routes: tuple[str, ...]) -> None:
    ends_well(routes)
