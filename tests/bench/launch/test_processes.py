"""Local ranks: they find each other, report, fail by name, and never outlive their parent."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from commlib.bench.launch.child import tell
from commlib.bench.launch.processes import RankFailed, run_ranks
from tests.support.leaks import children

pytestmark = pytest.mark.cold


def add_up(start: int) -> tuple[int, float]:
    """Sum start + rank over the ranks, as any torchrun program would."""
    dist.init_process_group("gloo")
    x = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(x)
    tell({"from": dist.get_rank()})
    print("a rank's own output")
    return dist.get_rank(), x.item()


def fail_on_one() -> None:
    """Rank 1 raises; rank 0 waits for it and would report a lost peer, or wait for ever."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ArithmeticError("seven is not eight")
    dist.barrier()


def die_on_zero(signum: int) -> None:
    """Rank 0 dies without a word."""
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signum)
    threading.Event().wait()


def exit_early() -> None:
    """Leaves without a result."""
    os._exit(7)


def hang() -> None:
    """Never ends."""
    threading.Event().wait()


def test_ranks_meet_and_answer_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    messages: list[tuple[int, object]] = []
    results = run_ranks(add_up, 2, (10,), on_message=lambda r, m: messages.append((r, m)), timeout=300)
    assert results == [(0, 21.0), (1, 21.0)]
    assert sorted(messages, key=str) == [(0, {"from": 0}), (1, {"from": 1})]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("a rank's own output") == 2


def test_the_rank_that_raised_is_named_and_the_others_are_ended() -> None:
    with pytest.raises(RankFailed, match="rank 1 failed: ArithmeticError: seven is not eight") as caught:
        run_ranks(fail_on_one, 2, timeout=300)
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, ArithmeticError)
    assert "fail_on_one" in caught.value.trace


@pytest.mark.full
def test_a_rank_that_dies_is_named_with_its_signal() -> None:
    with pytest.raises(RankFailed, match="rank 0 was killed by SIGKILL"):
        run_ranks(die_on_zero, 2, (int(signal.SIGKILL),), timeout=300)


def test_a_rank_that_leaves_without_a_result() -> None:
    with pytest.raises(RankFailed, match=r"rank 0 ended without a result \(exit code 7\)"):
        run_ranks(exit_early, 1, timeout=300)


def test_ranks_that_hang_are_ended_in_time() -> None:
    before = children()
    with pytest.raises(TimeoutError, match="rank 0 gave no result in time; all ranks were ended"):
        run_ranks(hang, 1, timeout=0.5)  # or it would wait until pytest's own deadline
    assert children().keys() <= before.keys()


def test_sigterm_is_itself_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RankFailed):
        run_ranks(exit_early, 1, env=lambda rank: {"OMP_NUM_THREADS": "1"})
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("world_size", [0, -1])
def test_world_size_must_be_positive(world_size: int) -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        run_ranks(hang, world_size)


def test_a_target_in_the_script_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "__module__", "__main__")
    with pytest.raises(ValueError, match="move it to a module"):
        run_ranks(hang, 1)
