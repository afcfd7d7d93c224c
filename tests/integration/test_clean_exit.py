"""A script that just ends, with attached models alive, ends with 0: it is not taken for a failed one."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from commlib.groups.world import World
from tests.docs.treated import recipe
from tests.support.clean_exits import KINDS, LOST, ROUTES
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer, same_everywhere

pytestmark = pytest.mark.timeout(2500)
RUNS = 1
TOGETHER = 3  # routes of one process, which imports PyTorch and forks all their ranks
SOME = "lost:none", "lost:powersgd:rank=2", "lost:fsdp", "raises:fp16", "raises:factors", "raises:zmq onebit"
"""Of those that lose a rank: error of DDP's own, of a hook, of FSDP2; over Gloo and zmq. The others are long."""


def together(routes: Sequence[str], *marks: pytest.MarkDecorator) -> list[Any]:
    groups = [tuple(routes[i : i + TOGETHER]) for i in range(0, len(routes), TOGETHER)]
    return [pytest.param(group, marks=[pytest.mark.full, *marks]) for group in groups]


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


@pytest.mark.parametrize("routes", together([r for r in ROUTES if r != "ddp"]), ids=" ".join)
def test_every_process_ends_with_0(routes: tuple[str, ...]) -> None:
    ends_well(routes)


EVERY = [f"{kind}:{route}" for kind in KINDS for route in LOST]
OTHERS = together([route for route in EVERY if route not in SOME], pytest.mark.long)


@pytest.mark.parametrize("routes", [*together(SOME), *OTHERS], ids=" ".join)
def test_who_has_lost_a_rank_ends_as_a_script_does_with_the_error_or_after_it(routes: tuple[str, ...]) -> None:
    assert set(routes) <= set(EVERY)
    ends_well(routes)


def forks(world: World, rule: str | None) -> tuple[int, bool]:
    """How a process ends that a rank forks between two steps, and whether the training goes on."""
    trainer = Trainer(world, rule)
    trainer.train(2)
    pid = os.fork()
    if pid == 0:
        atexit._run_exitfuncs()  # as Python does after the last line of a script
        os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    trainer.train(2)
    trainer.close()
    return code, same_everywhere(world, trainer.weights())


@pytest.mark.parametrize("rule", [None, "onebit"])
@pytest.mark.parametrize("backend", ["gloo", "zmq"])
def test_a_forked_process_leaves_what_is_its_parents_alone(fleet: Fleet, backend: str, rule: str | None) -> None:
    assert fleet.run(2, forks, rule, backend=backend, deadline=60) == [(7, True)] * 2
