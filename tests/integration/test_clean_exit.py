"""A script that just ends, with attached models alive, ends with 0: it is not taken for a failed one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.treated import recipe
from tests.support.clean_exits import LOST, ROUTES
from tests.support.tiers import full

RUNS = 2


def ends_well(route: str) -> None:
    (words,) = recipe("make exits")
    *command, most = words.split()[1:]
    assert int(most) >= RUNS
    done = subprocess.run(
        [sys.executable, *command, route, str(RUNS)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert f"{route}: 0 of" in done.stdout


@pytest.mark.parametrize("route", full(*(r for r in ROUTES if r != "ddp")))
def test_every_process_ends_with_0(route: str) -> None:
    ends_well(route)


@pytest.mark.parametrize("route", full(*(f"{kind}:{r}" for r in LOST for kind in ("lost", "raises"))))
def test_who_has_lost_a_rank_ends_as_a_script_does_with_the_error_or_after_it(route: str) -> None:
    ends_well(route)
