"""Simulated histories of whole jobs: whatever befalls them, they end right or by a named error, in time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest

from commlib.exchange.step_check import StepCheck
from commlib.groups.store import DeadlineStore
from commlib.groups.world import World
from commlib.server.job.version_ledger import VersionLedger
from commlib.server.membership.failure_detector import FailureDetector
from commlib.server.shard import saver
from commlib.server.storage import snapshot, snapshot_policy
from commlib.transports.process_group.collective_io import Going
from tests.docs.treated import recipe
from tests.support.rank_pool import Fleet
from tests.support.simulation import histories
from tests.support.simulation.__main__ import on_one_core, several
from tests.support.tiers import full


def _histories(world: World, kind: str, seeds: range) -> list[str]:
    with on_one_core(world.rank):
        return several(list(seeds), kind, False, float("inf"))


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        *(("collectives", range(60)), ("training", range(20)), ("training", range(20, 40))),
        *full(("server", range(10)), ("restarts", range(10)), ("training", range(40, 120))),
    ],
)
def test_they_end_right_or_by_a_named_error_in_time(fleet: Fleet, kind: str, seeds: range) -> None:
    assert fleet.run(1, _histories, kind, seeds) == [[]]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_new_ones_end_right_or_by_a_named_error_in_time() -> None:
    seed = time.time_ns() // 1_000_000_000 * 10_000
    (words,) = recipe("make simulate")
    command = [sys.executable, *words.split()[1:], "--seed", str(seed), "--histories", "10000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10000 histories" in done.stdout


def _twice(world: World, kind: str, seeds: range) -> list[bool]:
    with on_one_core(world.rank):
        return [histories.run(seed, kind).lines == histories.run(seed, kind).lines for seed in seeds]


@pytest.mark.parametrize("kind", ["collectives", "training", *full("server", "restarts")])
def test_a_history_follows_from_its_seed(fleet: Fleet, kind: str) -> None:
    assert fleet.run(1, _twice, kind, range(3)) == [[True] * 3]


def _without_deadline(self: DeadlineStore, call: Callable[[], Any]) -> Any:
    return call()


def _excused_altogether(self: FailureDetector, seconds: float) -> None:
    if seconds > 0:
        self._heard += 1e9


def _before_it_has_left(self: Going) -> None:
    self._left = []


def _twice_in(
    self: VersionLedger[Any], worker: int, stamp: int, value: Any, push: Callable[..., Any] = VersionLedger.push
) -> Any:
    applied = push(self, worker, stamp, value)
    return applied * 2 if len(applied) == 1 else applied


def _nothing(*_: object) -> None:
    pass


def _of_any_run(folder: str, keys: Collection[str], fingerprint: str) -> Any:
    def load(*args: Any) -> Any:
        found = snapshot.load(*args)
        for about in found.abouts.values():
            del about["run"]
        return found

    with mock.patch.object(snapshot_policy, "load", load):
        return snapshot_policy.restore(folder, keys, fingerprint)


FAULTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "a store that does not answer is waited for": ("training", DeadlineStore, "_ask", _without_deadline),
    "ranks' steps are not compared": ("training", StepCheck, "begin", _nothing),
    "a buffer is written to before it has left": ("collectives", Going, "free", _before_it_has_left),
    "a dead shard is excused by whoever is slow": ("server", FailureDetector, "excuse", _excused_altogether),
    "a push is in twice": ("server", VersionLedger, "push", _twice_in),
    "what two runs have saved is put together": ("restarts", saver, "restore", _of_any_run),
}
"""What went wrong once, or may: kind of the histories that find it, and what puts it back."""


def _first_wrong(world: World, fault: str, count: int) -> str:
    kind, owner, name, wrong = FAULTS[fault]
    with on_one_core(world.rank), mock.patch.object(owner, name, wrong):
        for seed in range(count):
            if found := several([seed], kind, False, float("inf")):
                return found[0]
    return ""


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_put_back_is_found(fleet: Fleet, fault: str) -> None:
    (found,) = fleet.run(1, _first_wrong, fault, 400)
    assert "make simulate" in found
