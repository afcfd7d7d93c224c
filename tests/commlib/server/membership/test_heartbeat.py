"""What a member's thread does with what it learns: a job that may be saved is not ended."""

from __future__ import annotations

import time

import pytest

from commlib.groups.store import DeadlineStore
from commlib.server.membership.heartbeat import Membership
from commlib.server.membership.leader import begin
from commlib.server.membership.registry import SHARD, MembershipStore, ShardReport
from tests.commlib.server.membership.test_leader import JOB, member, seen
from tests.support.thread_groups import new_store


def lost_shard(monkeypatch: pytest.MonkeyPatch, whole: list[bool]) -> tuple[MembershipStore, Membership, list[float]]:
    """A shard whose one peer is silent, and which has all keys or none, as told; the clock that it looks at."""
    roll, clock = MembershipStore(DeadlineStore(new_store(), 60.0)), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    epoch = begin(JOB, seen(0, 1, 100, 101))
    assert epoch is not None
    for id in (0, 1, 100, 101):
        roll.enlist(SHARD if id >= 100 else "worker", member(id).address, None, "host", id)
    roll.propose("", epoch, 100)
    membership = Membership(
        roll,
        member(100),
        JOB,
        epoch,
        name=roll.newest(),
        on_epoch=lambda _: None,
        on_over=lambda _: None,
        report=lambda _: ShardReport(frozenset(JOB.chunks if whole[0] else ()), 0),
        status=dict,
    )
    return roll, membership, clock


def looks(roll: MembershipStore, membership: Membership, clock: list[float], seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        clock[0] += 0.1
        for worker in (0, 1):
            roll.beat(worker, str(clock[0]))
        membership._look()


@pytest.mark.parametrize("comes", [True, False])
def test_a_key_is_lost_only_if_no_copy_comes_within_the_patience(monkeypatch: pytest.MonkeyPatch, comes: bool) -> None:
    whole = [False]
    roll, membership, clock = lost_shard(monkeypatch, whole)
    looks(roll, membership, clock, 1.5 * JOB.patience)
    assert roll.wanted() == 1  # its peer is given up, and its report says that the keys are lost
    assert roll.over() is None
    whole[0] = comes
    looks(roll, membership, clock, 2 * JOB.patience)
    over = roll.over()
    if comes:
        assert over is None
        assert roll.newest().startswith("1:")
    else:
        assert over is not None
        assert "is lost" in over
