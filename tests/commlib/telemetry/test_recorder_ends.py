"""However a recording ends, its file is whole; and what cannot be recorded is said at once."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.telemetry.trace import NONE, TraceFailed
from tests.support.tiny_ddp import model
from tests.support.trace_reader import spans

# -- how it ends -----------------------------------------------------------------------------------


def alone() -> None:
    """A group of this process only."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


@contextlib.contextmanager
def attached(rule: str = "onebit") -> Iterator[Any]:
    """One rank, in this process."""
    alone()
    models = [DistributedDataParallel(model())]
    comm = commlib.attach(models[0], rule, min_size=0)
    try:
        yield comm, lambda: models[0](torch.ones(8, 64)).square().mean().backward()
    finally:
        comm.close()
        models.clear()
        del comm
        gc.collect()
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def listener() -> None:
    """That of a process's first Gloo groups, which stays, is not left behind by a test."""
    with attached() as (_, step):
        step()


def steps(path: Path) -> int:
    return len(spans(path)["training"]["backward"])


@pytest.mark.parametrize("rule", ["onebit", "none"])
def test_one_rank_is_recorded_as_several_are(tmp_path: Path, rule: str) -> None:
    with attached(rule) as (comm, step), comm.trace(tmp_path / "t.json") as recording:
        assert recording.path == tmp_path / "t.json"
        step()
        step()
        recording.stop()
        assert not recording.running
        step()
    assert steps(tmp_path / "t.json") == 2


def test_an_error_in_the_block_passes_and_the_file_is_whole(tmp_path: Path) -> None:
    with attached() as (comm, step):

        def fails() -> None:
            with comm.trace(tmp_path / "t.json"):
                step()
                raise KeyError("x")

        with pytest.raises(KeyError):
            fails()
        assert steps(tmp_path / "t.json") == 1
        with comm.trace(tmp_path / "t.json"):
            step()
            step()
    assert steps(tmp_path / "t.json") == 2


def test_close_ends_it(tmp_path: Path) -> None:
    with attached() as (comm, step):
        comm.trace(tmp_path / "t.json")
        step()
        assert steps(tmp_path / "t.json") == 0  # but it is a whole file
        comm.close()
        assert steps(tmp_path / "t.json") == 1


def test_what_nobody_stops_is_saved_with_the_last_reference(tmp_path: Path) -> None:
    alone()
    for rule in ("onebit", "none"):
        ddp = DistributedDataParallel(model())
        commlib.attach(ddp, rule, min_size=0).trace(tmp_path / f"{rule}.json")
        ddp(torch.ones(8, 64)).square().mean().backward()
        del ddp
        gc.collect()
        assert steps(tmp_path / f"{rule}.json") == 1
    dist.destroy_process_group()


SCRIPT = """
import os, torch, torch.distributed as dist, commlib
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
comm = commlib.attach(ddp, "onebit")
comm.trace("t.json")
os.chdir("/")
ddp(torch.ones(8, 64)).square().mean().backward()
dist.destroy_process_group()
"""


@pytest.mark.full
def test_the_end_of_the_process_ends_it_wherever_that_has_gone_meanwhile(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr
    assert steps(tmp_path / "t.json") == 1


FORKING = """
import os, torch
from commlib.telemetry.recorder import Tracer
model = torch.nn.Linear(2, 2)
tracer = Tracer(model, 0)
tracer.start("t.json")
empty = open("t.json").read()
model(torch.ones(2)).sum().backward()
if os.fork() == 0:
    raise SystemExit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert open("t.json").read() == empty
"""


@pytest.mark.full
def test_a_process_that_was_forked_writes_nothing_at_its_end(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKING], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps(tmp_path / "t.json") == 1


# -- what is wrong is said at once -----------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no folder": (lambda folder: folder / "none" / "t.json", r"cannot be saved to .*none.t\.json: No such file"),
    "a folder": (lambda folder: folder, "Is a directory"),
    "a file for a folder": (lambda folder: folder / "file" / "t.json", "Not a directory"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_path_that_cannot_be_is_named_before_anything_is_recorded(tmp_path: Path, what: str) -> None:
    make, message = WRONG[what]
    (tmp_path / "file").write_text("")
    with attached() as (comm, step):
        with pytest.raises(TraceFailed, match=message):
            comm.trace(make(tmp_path))
        assert comm._tracer.trace is comm._sequencer.trace is NONE
        step()
        with comm.trace(tmp_path / "t.json"):
            step()
    assert steps(tmp_path / "t.json") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "t.json"]


def test_a_second_one_while_one_runs_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with attached() as (comm, step):
        with comm.trace(tmp_path / "t.json"):
            step()
            with pytest.raises(ValueError, match=r"t\.json is being recorded: stop\(\) that before"):
                comm.trace(tmp_path / "other.json")
            step()
        assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    assert steps(tmp_path / "t.json") == 2


def test_a_file_that_cannot_be_written_any_more_is_an_error_but_not_in_place_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with attached() as (comm, step):
        for end in ("stop", "error", "close"):
            folder = tmp_path / end
            folder.mkdir()
            recording = comm.trace(folder / "t.json")
            step()
            (folder / "t.json").unlink()
            folder.rmdir()
            if end == "stop":
                with pytest.raises(TraceFailed, match="cannot be saved"):
                    recording.stop()
            elif end == "error":
                with pytest.raises(KeyError), recording:
                    raise KeyError("x")
            else:
                comm.close()
            assert not recording.running
            assert [f"{end}/t.json" in r.getMessage() for r in caplog.records] == [True] * (end != "stop")
            caplog.clear()
