"""What becomes of a view: nothing without reason, and everything that must."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from commlib.runtime.optimizers import Recipe
from commlib.server.job.job import ServerJob
from commlib.server.membership.leader import JobOver, MembersSeen, WantReports, begin, decide
from commlib.server.membership.registry import SHARD, WORKER, Epoch, Member, ShardReport

JOB = ServerJob(
    {f"p{i}": ((300,), "float32") for i in range(8)},
    (Recipe(torch.optim.SGD, {"lr": 0.1}),),
    {f"p{i}": 0 for i in range(8)},
    "ssp:3",
    workers=2,
    shards=2,
    copies=2,
    nbytes=1024,
)
NBYTES = {key: c.nbytes for key, c in JOB.chunks.items()}


def member(id: int) -> Member:
    return Member(id, WORKER if id < 100 else SHARD, f"inproc://{id}", None, f"host pid {id}")


def seen(*ids: int, words: dict[int, str] | None = None, silent: dict[int, float] | None = None) -> MembersSeen:
    return MembersSeen({i: member(i) for i in ids}, dict.fromkeys(ids, "1") | (words or {}), silent or {})


def first() -> Epoch:
    found = begin(JOB, seen(0, 1, 100, 101))
    assert found is not None
    return found


def reports(epoch: Epoch, clock: int = 0) -> dict[int, ShardReport]:
    places = epoch.view.places
    return {
        i: ShardReport(frozenset(k for k, at in places.items() if m.name in at), clock)
        for i, m in epoch.of(SHARD).items()
    }


def test_it_begins_when_all_are_there_and_not_before() -> None:
    assert begin(JOB, seen(0, 1, 100)) is None
    assert begin(JOB, seen(0, 100, 101)) is None
    epoch = first()
    assert (epoch.view.number, dict(epoch.view.workers)) == (0, {0: 0, 1: 0})
    assert {len(at) for at in epoch.view.places.values()} == {2}


def test_as_long_as_all_is_well_nothing_changes() -> None:
    assert decide(JOB, NBYTES, first(), seen(0, 1, 100, 101), {}) is None


def test_a_lost_shard_is_left_out_once_the_others_have_told_what_they_have() -> None:
    epoch, now = first(), seen(0, 1, 100, 101, silent={101: 12.3})
    assert decide(JOB, NBYTES, epoch, now, {}) == WantReports()
    told = {i: r for i, r in reports(epoch).items() if i == 100}
    found = decide(JOB, NBYTES, epoch, now, told)
    assert isinstance(found, Epoch)
    assert found.view.number == 1
    assert set(found.view.places.values()) == {("shard-100",)}
    assert found.gone == {101}
    assert "shard-101 (host pid 101) is lost: silent for 12.3 s" in found.news


def test_without_a_second_copy_the_job_is_over_and_says_what_is_lost() -> None:
    job = dataclasses.replace(JOB, copies=1)
    epoch = begin(job, seen(0, 1, 100, 101))
    assert epoch is not None
    told = {100: reports(epoch)[100]}
    found = decide(job, NBYTES, epoch, seen(0, 1, 100, 101, silent={101: 9.0}), told)
    assert isinstance(found, JobOver)
    assert "was kept by shard-101, and is lost: more copies, or --restore of a snapshot" in found.why
    assert not found.surely  # it may come back, or what it sent still be under way


def test_a_job_whose_first_worker_died_before_it_gave_the_values_says_so() -> None:
    epoch = first()
    nothing = {i: ShardReport(frozenset(), 0) for i in epoch.of(SHARD)}
    found = decide(JOB, NBYTES, epoch, seen(0, 1, 100, 101, silent={0: 9.0}), nothing)
    assert isinstance(found, JobOver)
    assert "was not given its first values, which is the first worker's part: restart" in found.why


def test_a_newcomer_gets_copies_first_and_owns_them_in_the_view_after() -> None:
    epoch, now = first(), seen(0, 1, 100, 101, 102)
    second = decide(JOB, NBYTES, epoch, now, reports(epoch))
    assert isinstance(second, Epoch)
    assert "shard-102 (host pid 102) came" in second.news
    assert not any(at[0] == "shard-102" for at in second.view.places.values())
    assert any("shard-102" in at for at in second.view.places.values())
    told = reports(second)
    assert decide(JOB, NBYTES, second, now, told | {102: ShardReport(frozenset(), 0)}) is None  # it has nothing yet
    third = decide(JOB, NBYTES, second, now, told)
    assert isinstance(third, Epoch)
    assert any(at[0] == "shard-102" for at in third.view.places.values())
    assert decide(JOB, NBYTES, third, now, reports(third)) is None


def test_a_shard_that_leaves_goes_when_others_have_what_it_had() -> None:
    job = dataclasses.replace(JOB, copies=1)
    epoch = begin(job, seen(0, 1, 100, 101))
    assert epoch is not None
    now = seen(0, 1, 100, 101, words={101: "leaving 5"})
    second = decide(job, NBYTES, epoch, now, reports(epoch))
    assert isinstance(second, Epoch)
    assert 101 in second.members
    third = decide(job, NBYTES, second, now, reports(second))
    assert isinstance(third, Epoch)
    assert {at[0] for at in third.view.places.values()} == {"shard-100"}
    rest = third if 101 not in third.members else decide(job, NBYTES, third, now, reports(third))
    assert isinstance(rest, Epoch)
    assert 101 in rest.gone


def test_the_last_shard_does_not_leave_while_somebody_trains() -> None:
    now = seen(0, 1, 100, words={100: "leaving 5"})
    epoch = begin(dataclasses.replace(JOB, shards=1, copies=1), seen(0, 1, 100))
    assert epoch is not None
    assert decide(dataclasses.replace(JOB, shards=1, copies=1), NBYTES, epoch, now, reports(epoch)) is None


def test_a_worker_that_comes_late_begins_at_the_highest_clock() -> None:
    epoch = first()
    found = decide(JOB, NBYTES, epoch, seen(0, 1, 7, 100, 101), reports(epoch, clock=42))
    assert isinstance(found, Epoch)
    assert dict(found.view.workers) == {0: 0, 1: 0, 7: 42}


def test_who_was_given_up_does_not_come_back_under_its_old_number() -> None:
    epoch = dataclasses.replace(first(), gone=frozenset({7}))
    assert decide(JOB, NBYTES, epoch, seen(0, 1, 7, 100, 101), reports(epoch)) is None


def test_it_is_over_when_all_workers_have_left_and_says_who_was_lost_if_one_was() -> None:
    epoch = first()
    assert decide(JOB, NBYTES, epoch, seen(0, 1, 100, 101, words={0: "left", 1: "left"}), {}) == JobOver(
        "all workers have left"
    )
    lost = decide(JOB, NBYTES, epoch, seen(0, 1, 100, 101, words={0: "left"}, silent={1: 11.0}), {})
    assert isinstance(lost, JobOver)
    assert "no worker is left" in lost.why
    assert "worker-1 (host pid 1) is lost: silent for 11.0 s" in lost.why


def test_with_lost_fail_a_lost_worker_ends_the_job_and_one_that_left_does_not() -> None:
    job, epoch = dataclasses.replace(JOB, lost="fail"), first()
    found = decide(job, NBYTES, epoch, seen(0, 1, 100, 101, silent={1: 11.0}), {})
    assert isinstance(found, JobOver)
    assert "worker-1 (host pid 1) is lost: silent for 11.0 s; the job fails with a worker" in found.why
    assert isinstance(decide(job, NBYTES, epoch, seen(0, 1, 100, 101, words={1: "left"}), reports(epoch)), Epoch)


def test_of_several_groups_of_servers_none_may_go_or_come() -> None:
    job = dataclasses.replace(JOB, consistency="groups:groups=2,server_groups=2", copies=1)
    nbytes = {key: c.nbytes for key, c in job.chunks.items()}
    epoch = begin(job, seen(0, 1, 100, 101))
    assert epoch is not None
    assert {key[-1]: at[0] for key, at in epoch.view.places.items()} == {"0": "shard-100", "1": "shard-101"}
    assert decide(job, nbytes, epoch, seen(0, 1, 100, 101, 102), {}) is None
    lost = decide(job, nbytes, epoch, seen(0, 1, 100, 101, silent={101: 9.0}), {})
    assert isinstance(lost, JobOver)
    assert "shard-101 (host pid 101) is lost: silent for 9.0 s; groups of servers need all" in lost.why
    leaving = decide(job, nbytes, epoch, seen(0, 1, 100, 101, words={100: "leaving 3"}), {})
    assert isinstance(leaving, JobOver)
    gone = seen(1, 100, 101)
    assert isinstance(decide(job, nbytes, epoch, gone, {}), WantReports)
    following = decide(job, nbytes, epoch, gone, reports(epoch))
    assert isinstance(following, Epoch)
    assert following.view.workers == {1: 0}
    assert following.view.places == epoch.view.places


def test_matrices_are_not_cut_for_optimizers_that_look_at_them_whole() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    by_matrix = Recipe(torch.optim.Adafactor, {"lr": 0.1})
    job = dataclasses.replace(
        JOB, parameters={"w": ((64, 64), "float32")}, chosen={"w": 0}, recipes=(by_matrix,), copies=1, shards=1
    )
    assert list(job.chunks) == [f"w[0:{weight.numel()}]"]
    assert list(dataclasses.replace(job, recipes=JOB.recipes).chunks) != list(job.chunks)
