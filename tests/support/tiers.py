"""The two tiers of the suite: ``make test`` leaves out what is marked ``full``, ``make test-all`` runs everything.

A test of the fast tier takes at most :data:`LIMIT_S`: of the cores, or of waiting although no process wanted for a
core. The last lines of a run name those that took longer. Such a test fails if that is sure: a second of a core counts
half, for the same work has taken twice as many from one hour or machine to the next; and it has failed in a second try,
while no other test ran (the first of its kind may have much to import, to compile, or to read from a disk), in which
the limit is longer in proportion where a core does less in a second than those that the limit was made for.
:data:`LONGER` says which tests may take longer, and why. (In ``make test-all``, where properties have three times as
many examples, all may take three times as long.)
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol  # as plug-ins that run a test again use it
from hypothesis import settings

from tests.support.exclusive_lock import turn
from tests.support.leaks import descendants
from tests.support.steady import FAST as FAST

LIMIT_S = 5.0
"""Seconds that a test of the fast tier may take, its fixtures not counted, where cores are as fast as usual."""

_MORE = 3.0  # times as many examples where hypothesis searches anew

_USUAL_S = 0.020
"""Seconds that :func:`slowness` works for on a core as fast as usual."""

_SURE = 0.5
"""What a second of a core counts where a test is to fail by it."""

_TOOK = "took_s"  # the property of a report of a test that took longer than the limit, sure or not

_WAITS = "it waits for a time-out to lapse, which is long enough for busy ranks to be in time"

LONGER: dict[str, str] = {
    "tests/repository/test_leaks.py::"
    "test_leaks_fail_the_test_that_made_them": "it waits for what does not go away, three times",
    "tests/integration/test_hook_bad_input.py::test_a_rank_that_never_attaches_is_named_within_the_time_out": _WAITS,
    "tests/integration/test_hook_bad_input.py::test_the_others_do_not_hang_when_one_rank_passes_no_ddp_model": _WAITS,
    "tests/commlib/planning/manager/test_manager_ddp.py::test_a_rank_that_does_not_come_to_a_review_is_named": _WAITS,
    "tests/commlib/local_sgd/test_local_steps.py::test_nobody_waits_for_ever_for_a_rank_that_does_not_come": _WAITS,
    "tests/commlib/zero/test_step.py::test_a_rank_that_does_not_come_is_named": _WAITS,
    "tests/integration/test_hierarchy_peer_lost.py::"
    "test_every_other_rank_names_it_in_time_fails_the_next_step_too_and_ends_by_itself": "two roll calls",
    "tests/integration/test_stopped_ranks.py::"
    "test_all_others_raise_whether_the_stopped_rank_keeps_the_store_or_not": _WAITS,
    "tests/transports/process_group/test_cuts.py::test_the_right_result_or_a_named_error_in_time": _WAITS,
    "tests/commlib/test_exports.py::test_docstring_examples": "it imports every module, and Lightning with one",
    "tests/commlib/server/worker/test_parameter_server_faults.py::"
    "test_who_does_not_come_is_named_within_the_deadline": _WAITS,
    "tests/commlib/monitoring/test_replica_check.py::test_who_does_not_come_is_named": _WAITS,
    "tests/commlib/pipeline/test_hetpipe.py::"
    "test_with_no_distance_two_pipelines_compute_what_one_process_does_to_the_last_bit": "a server for each stage",
    "tests/commlib/cli/test_doctor.py::test_two_processes_all_reduce": "two processes import PyTorch, as a user's do",
    "tests/commlib/integrations/test_lightning.py::"
    "test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit": "eight trainings",
    "tests/commlib/integrations/test_transformers.py::"
    "test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit": "eight trainings",
    "tests/bench/trainer/test_trainer_command.py::test_json_of_codecs_and_seeds": "four trainings by the command",
    "tests/bench/exchange/test_exchange_command.py::test_figures_of_two_ranks_as_json_and_kept": "it is a benchmark",
    "tests/docs/test_commands.py::test_every_command_is_readable_and_has_a_treatment": "hundreds of commands",
    "tests/compressors/kernels/cpu/test_codecs.py::"
    "test_decodes_what_the_reference_does_for_any_number_of_ranks": "the first one compiles",
}
"""Test without its parameters → why it takes longer. At most twenty."""


def full(*values: Any) -> list[Any]:
    """Values of a parameter that only ``make test-all`` runs: ``parametrize("size", [2, *full(3, 4)])``."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.full) for v in values]


def long(*values: Any) -> list[Any]:
    """Values of a parameter that take longer than ``make test-all`` may: a target of make of their own runs them."""
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=[pytest.mark.full, pytest.mark.long]) for v in values
    ]


_LATE = pytest.StashKey[str]()
_PLACE = pytest.StashKey[contextlib.ExitStack]()
_KEPT = pytest.StashKey[contextlib.ExitStack]()  # of a session: the place of a test that has ended, for the next


@contextlib.contextmanager
def place_of(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Wait for the test's turn (tests/support/exclusive_lock.py), and keep it until it has ended.

    Of several that are alone, one after another, the first waits, and the others find the place empty: between two,
    tests of other processes would come in, of which some take minutes.
    """
    alone = item.get_closest_marker("alone") is not None
    with contextlib.ExitStack() as place:
        if (kept := item.config.stash.get(_KEPT, None)) is not None:
            del item.config.stash[_KEPT]
            place.enter_context(kept)
        else:
            place.enter_context(turn(alone=alone))
        item.stash[_PLACE] = place
        try:
            yield
        finally:
            if alone and nextitem is not None and nextitem.get_closest_marker("alone") is not None:
                item.config.stash[_KEPT] = place.pop_all()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of the fast tier, and once more, alone, if it took too long."""
    if not is_fast(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if _LATE in item.stash:
        if _PLACE in item.stash:
            item.stash[_PLACE].close()
            item.stash[_PLACE].enter_context(turn(alone=True))
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test of the fast tier that took too long."""
    clock = Clock()
    yield
    if not is_fast(item):
        return
    more = _MORE if item.config.getoption("--hypothesis-profile") == "fresh" else 1.0
    of_cores, waiting = clock.took()
    item.user_properties[:] = [(name, value) for name, value in item.user_properties if name != _TOOK]
    if too_long(item.nodeid, of_cores + waiting, more):
        item.user_properties.append((_TOOK, of_cores + waiting))
    if too_long(item.nodeid, sure := of_cores * _SURE + waiting, more):
        second = _LATE in item.stash
        item.stash[_LATE] = why = too_long(item.nodeid, sure, more * (slowness() if second else 1.0)) or ""
        if why:
            pytest.fail(why, pytrace=False)


def examples(most: int) -> int:
    """How many examples a property is tried with: so many in ``make test-all``, fewer in the fast tier."""
    return max(min(most, 5), most * settings().max_examples // 100)


def is_fast(item: pytest.Item) -> bool:
    """Whether ``make test`` runs it. Tests that compare times (``alone``) never are."""
    return item.get_closest_marker("full") is None and item.get_closest_marker("alone") is None


class Clock:
    """What a test takes from when this is made."""

    def __init__(self) -> None:
        self._began, self._used, self._stalled = time.monotonic(), used(), stalled()

    def took(self) -> tuple[float, float]:
        """Seconds of cores, and seconds of waiting in which no process wanted for a core.

        What is not over the limit by the wall is not looked into: it is all taken for waiting.
        """
        wall = time.monotonic() - self._began
        if wall <= LIMIT_S:
            return 0.0, wall
        of_cores = used() - self._used
        return of_cores, max(0.0, wall - (stalled() - self._stalled) - of_cores)


def too_long(name: str, seconds: float, slow: float = 1.0) -> str | None:
    """What is wrong with a test of the fast tier that took so long; None if nothing is.

    Args:
        name: pytest's node id.
        seconds: by its :class:`Clock`.
        slow: by :func:`slowness`.
    """
    if seconds <= LIMIT_S * slow or name.partition("[")[0] in LONGER:
        return None
    return (
        f"took {seconds:.1f} s, those of the cores counted half; "
        f"a test of the fast tier may take {LIMIT_S * slow:.2g} s here. "
        "Make it do less, mark it full, or say in LONGER of tests/support/tiers.py why it may take longer"
    )


def slowness() -> float:
    """How many times longer than usual a core works now for the same, at least 1."""
    took = []
    for _ in range(9):
        began = time.thread_time()
        sum(i & 7 for i in range(400_000))
        took.append(time.thread_time() - began)
    return max(1.0, statistics.median(took) / _USUAL_S)


def used() -> float:
    """CPU seconds of this process and of all that it has started, ended ones too."""
    times, ticks = os.times(), 0
    for pid in descendants():
        with contextlib.suppress(OSError):  # it has ended: its parent's figures have its time
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return sum(times[:4]) + ticks / os.sysconf("SC_CLK_TCK")


def stalled() -> float:
    """Seconds since the start of the machine in which some process waited for a core; 0.0 where this is not counted."""
    with contextlib.suppress(OSError):
        found = re.search(r"some .*total=(\d+)", Path("/proc/pressure/cpu").read_text())
        if found is not None:
            return int(found[1]) / 1e6
    return 0.0


def longest(properties: Iterable[tuple[str, Iterable[tuple[str, object]]]]) -> str:
    """Tests that took longer than the limit, the longest first: "tests/x.py::test_y 7.1 s, …".

    Args:
        properties: each test's node id, and what its report says beside the outcome.
    """
    took = {name: float(str(v)) for name, said in properties for key, v in said if key == _TOOK}
    return ", ".join(f"{name} {took[name]:.1f} s" for name in sorted(took, key=lambda name: -took[name]))


def left_out(reasons: Iterable[str]) -> str:
    """Why tests were skipped, the most frequent reason first: "227 × needs a CUDA device; 1 × …".

    Args:
        reasons: one for each skipped test, with what would change it in its words.
    """
    counts = collections.Counter(re.sub(r"^Skipped: ", "", reason) for reason in reasons)
    return "; ".join(f"{n} × {reason}" for reason, n in counts.most_common())
