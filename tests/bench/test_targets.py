"""One way to start the ranks of a benchmark: here, in a lab, or under torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commlib.bench.lab import Lab
from commlib.bench.launch.processes import RankFailed
from commlib.bench.targets import InLab, place

# A file a rank: what two ranks print may meet in the middle of a line.
JOB = """
import os, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from commlib.bench.targets import place
from test_targets import add_up
with place(None, None, None) as p:
    result = (p.run(add_up, (1,)), p.facts()["ranks"])
Path({out!r}, os.environ["RANK"]).write_text(repr(result))
"""


def add_up(start: int) -> float:
    """The sum of start + rank."""
    dist.init_process_group("gloo")
    x = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def fail() -> None:
    """Rank 1 raises."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ArithmeticError("seven is not eight")
    dist.barrier()


def test_two_ranks_here_by_default() -> None:
    with place(None, None, None) as p:
        assert p.launches
        assert p.facts() == {"ranks": 2, "hosts": None, "ranks_per_host": 2, "rate": None}
        assert p.run(add_up, (10,), timeout=300) == 21.0


@pytest.mark.full
def test_ranks_on_emulated_hosts_again_and_again(lab: Callable[..., Lab]) -> None:
    with place(None, 2, "200mbit", 2) as p:
        assert p.facts() == {"ranks": 4, "hosts": 2, "ranks_per_host": 2, "rate": "200mbit"}
        assert p.run(add_up, (0,), timeout=300) == 6.0
        with pytest.raises(RankFailed, match="rank 1 failed: ArithmeticError"):
            p.run(fail, timeout=300)
        assert p.run(add_up, (1,), timeout=300) == 10.0
        assert isinstance(p, InLab)
        assert all(c.sent_bytes > 0 for c in p.lab.counters())


@pytest.mark.full
@pytest.mark.usefixtures("warm_python")
def test_under_torchrun_only_rank_0_has_the_result(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB.format(folder=str(Path(__file__).parent), out=str(tmp_path)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["(3.0, 2)", "(None, 2)"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((0, None, None), "--ranks must be at least 1"),
        ((None, None, "50mbit"), "say how many with --hosts"),
        ((None, None, None, 2), "say how many with --hosts"),
        ((3, 4, None), "leave --ranks out"),
        ((None, 2, "fast"), "a rate is a number"),
        ((None, 0, None), "a lab has 1 to 64 hosts"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: tuple[int | None, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said), place(*options):  # type: ignore[arg-type]
        pass


def test_under_torchrun_the_ranks_are_started_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="leave --ranks, --hosts out"), place(4, 4, None):
        pass
    with place(None, None, None) as p:
        assert not p.launches
        assert p.facts()["ranks"] == 4
