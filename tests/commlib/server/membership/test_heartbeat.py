"""What a member's thread does with what it learns: a job that may be saved is not ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from commlib.groups.store import DeadlineStore
from commlib.server.membership.heartbeat import Membership
from commlib.server.membership.leader import begin
from commlib.server.membership.registry import SHARD, MembershipStore, ShardReport
from tests.commlib.server.membership.test_leader import JOB, member, seen
from tests.support.thread_groups import new_store


def lost_shard(
    monkeypatch: pytest.MonkeyPatch, whole: list[bool], me: int = 100
) -> tuple[MembershipStore, Membership, list[float]]:
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
        member(me),
        JOB,
        epoch,
        name=roll.newest(),
        on_epoch=lambda _: None,
        on_over=lambda _: None,
        report=lambda _: ShardReport(frozenset(JOB.chunks if whole[0] else ()), 0),
        status=dict,
    )
    return roll, membership, clock


def looks(
    roll: MembershipStore, membership: Membership, clock: list[float], seconds: float, beating: Sequence[int] = (0, 1)
) -> None:
    for _ in range(round(seconds / 0.1)):
        clock[0] += 0.1
        for each in beating:
            roll.beat(each, str(clock[0]))
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


def test_a_key_that_seemed_lost_before_another_led_has_the_whole_patience_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roll, membership, clock = lost_shard(monkeypatch, [False], me=101)
    looks(roll, membership, clock, 1.5 * JOB.patience)  # shard 100 is silent: this one leads, and a key seems lost
    assert roll.wanted() == 1
    looks(roll, membership, clock, 0.6 * JOB.patience, beating=(0, 1, 100))  # it was slow only, and leads again
    looks(roll, membership, clock, 1.6 * JOB.patience)
    assert roll.over() is None
    looks(roll, membership, clock, 1.0 * JOB.patience)
    assert roll.over() is not None
