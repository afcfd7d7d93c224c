"""Real ranks: contenders that fail, hang, die or are wrong, and what becomes of the others."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commlib.bench.launch.processes import RankFailed
from commlib.bench.results.table import Row
from commlib.bench.targets import Here
from commlib.bench.training.configurations import Configuration
from commlib.bench.training.results import rows
from commlib.bench.training.runner import BaselineFailed, race
from commlib.bench.training.schedule import Schedule
from commlib.bench.training.trial import TrainingJob
from commlib.exchange.rate_limit import RateLimit


# DDP compares a hook's annotations with the types themselves: these have none.
def _fail(state, bucket):
    raise TypeError("this hook cannot")


def _hang_one(state, bucket):
    if dist.get_rank() == 1:
        threading.Event().wait()
    return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future().then(lambda f: f.value()[0])


def _hang_all(state, bucket):
    ctypes.PyDLL(None).sleep(60)  # nobody else gets the GIL meanwhile


def _die(state, bucket):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future().then(lambda f: f.value()[0])


def _add(state, bucket):
    """The sum, not the mean."""
    return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future().then(lambda f: f.value()[0])


def _keep(state, bucket):
    """Every rank its own gradient."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


_BAD: dict[str, Callable[..., Any]] = {
    "fail": _fail,
    "hang-one": _hang_one,
    "hang-all": _hang_all,
    "die": _die,
    "add": _add,
    "keep": _keep,
}


@dataclasses.dataclass(frozen=True)
class Bad(Configuration):
    """A hook with a fault."""

    def put_on(self, ddp: DistributedDataParallel, group: Any, timeout: float) -> None:
        if self.name in _BAD:
            ddp.register_comm_hook(group, _BAD[self.name])


DDP = Configuration("ddp", "pytorch", True)
NONE = Configuration("none", "commlib", True)
PLACED = Configuration("placed:head+blocks.*.mlp.*", "commlib", True)
ONEBIT = Configuration("onebit", "commlib", False)


PATIENCE_S = 200.0
"""For a visit that comes to an end, on a machine with much else to do."""


@dataclasses.dataclass
class Hasty(Schedule):
    """Who is made to hang has not long to do so."""

    def limit_s(self, name: str) -> float:
        return 15.0 if name.startswith("hang") else super().limit_s(name)


def bad(name: str, exact: bool = False) -> Configuration:
    return Bad(name, "commlib", exact)


def run(*contenders: Configuration, backward_s: float | None = None, rounds: int = 1) -> dict[str, Row]:
    job = TrainingJob("gpt-small", [DDP, *contenders], 1, 4, backward_s, "gloo")
    schedule = Hasty([c.name for c in job.contenders], rounds, 1, 10.0, PATIENCE_S, PATIENCE_S)
    result = race(Here(2), job, schedule, lambda visit, s: None)
    assert result is not None
    done, line = result
    assert line is not None
    assert line.gbit_s > 0
    return {str(r["route"]): r for r in rows(done, job.contenders, model="gpt-small", parameters=1)}


@pytest.mark.full
@pytest.mark.parametrize("backward_s", [None, 0.05])
def test_right_and_wrong_routes_are_told_apart(backward_s: float | None) -> None:
    exact = [bad("add", True), bad("keep", True)]
    seen = run(NONE, PLACED, ONEBIT, *exact, bad("fail"), rounds=2, backward_s=backward_s)
    assert {n: r["loss_ok"] for n, r in seen.items()} == {
        "ddp": True,
        "none": True,
        PLACED.name: True if backward_s is None else None,
        "onebit": True,
        "add": False,
        "keep": False,
        "fail": None,
    }
    status = {n: str(r["status"]) for n, r in seen.items() if r["status"] != "ok"}
    if backward_s is not None:
        assert "no activations" in status.pop(PLACED.name)
    assert status == {"fail": "TypeError: this hook cannot"}
    assert seen["none"]["socket_bytes"] == pytest.approx(seen["ddp"]["socket_bytes"], rel=0.01)
    assert float(str(seen["onebit"]["times_fewer"])) > 15
    assert all(2 <= int(str(r["steps"])) <= 4 for r in seen.values() if r["status"] == "ok")  # fast ones get more
    if backward_s is None:
        assert seen[PLACED.name]["loss"] == pytest.approx(seen["ddp"]["loss"], rel=1e-5)
        assert seen["none"]["loss"] == pytest.approx(seen["ddp"]["loss"], rel=1e-5)
    else:
        assert float(str(seen["ddp"]["step_s"])) >= backward_s
        assert seen["ddp"]["loss"] is None


def test_a_limit_holds_up_commlibs_contender_and_a_hierarchy_on_one_node_is_flat_and_says_so() -> None:
    seen = run(dataclasses.replace(NONE, limit="100mbit", hierarchy=True), backward_s=0.0)
    row, values = seen["none"], 664_704
    assert (row["status"], row["limit"], row["levels"]) == ("ok", "100mbit", "flat: all ranks (2) are on one node")
    limit = RateLimit(100)  # 2(P−1)/P of the gradient is one; a burst of it may leave at once
    assert float(str(row["step_s"])) >= limit.seconds(4 * values - limit.at_once)
    assert (seen["ddp"]["limit"], seen["ddp"]["levels"]) == (None, None)


@pytest.mark.full
def test_who_hangs_or_dies_is_named_and_the_run_goes_on() -> None:
    seen = run(bad("die"), bad("hang-one"), bad("hang-all"), ONEBIT)
    assert seen["die"]["status"] == "rank 1 was killed by SIGKILL (out of memory?)"
    assert "hung" in str(seen["hang-one"]["status"])
    assert seen["hang-all"]["status"] == "hung, no end after 15 s"
    assert (seen["ddp"]["status"], seen["onebit"]["status"]) == ("ok", "ok")
    assert seen["onebit"]["loss_ok"] is True
    assert seen["die"]["steps"] == 0


def test_without_the_baseline_there_is_nothing_to_compare() -> None:
    job = TrainingJob("gpt-small", [bad("die"), ONEBIT], 1, 4, None, "gloo")
    with pytest.raises(BaselineFailed, match="killed by SIGKILL"):
        race(Here(2), job, Schedule(["die", "onebit"], 1, 1, 10.0, PATIENCE_S, PATIENCE_S), lambda visit, s: None)


def test_ranks_that_cannot_even_start_are_an_error() -> None:
    job = TrainingJob("gpt-small", [DDP], 1, 4, None, "no-such-backend")
    with pytest.raises(RankFailed, match="failed"):
        race(Here(2), job, Schedule(["ddp"], 1, 1, 10.0, PATIENCE_S, PATIENCE_S), lambda visit, s: None)


@pytest.mark.full
def test_the_watchdog_says_who_hangs_where_no_parent_does() -> None:
    script = (
        "import threading\nfrom commlib.bench.training.worker import watched\n"
        "with watched('quick', 60.0, aloud=True): pass\n"
        "with watched('powersgd', 0.2, aloud=True): threading.Event().wait()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "powersgd hangs" in done.stderr
    assert "quick" not in done.stderr
