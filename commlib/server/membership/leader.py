"""Leader's decision on the next view, from who came, who is silent and what the shards have. Pure.

One shard decides at a time, the one with the lowest id that seems to live. If two take themselves for it, the store
takes the view of one (:mod:`commlib.server.membership.registry`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from commlib.errors import PeerLost
from commlib.server.job.job import FAIL, ServerJob
from commlib.server.membership.hash_ring import HashRing, place
from commlib.server.membership.registry import LEAVING, LEFT, SHARD, WORKER, Epoch, Member, ShardReport
from commlib.server.membership.view import first, following


@dataclasses.dataclass(frozen=True)
class JobOver:
    """Decision that the job ends.

    Args:
        why: it does, in words.
        surely: false where a shard may yet get what its last report lacks, or one that was silent come back.
    """

    why: str
    surely: bool = True


@dataclasses.dataclass(frozen=True)
class WantReports:
    """All shards are to report, for the next view."""


@dataclasses.dataclass(frozen=True)
class MembersSeen:
    """Knowledge of the members, by id.

    Args:
        members: all that ever came.
        words: what they last said.
        silent: those that have been silent for too long → seconds.
    """

    members: Mapping[int, Member]
    words: Mapping[int, str]
    silent: Mapping[int, float]

    def living(self, kind: str, gone: frozenset[int]) -> dict[int, Member]:
        """Members of a kind that are here or may be taken in; shards that are leaving are among them."""
        return {
            i: m
            for i, m in sorted(self.members.items())
            if m.kind == kind and i not in gone and i not in self.silent and self.words.get(i) != LEFT
        }

    def leaving(self, id: int) -> bool:
        """Whether a shard hands over what it has, and goes."""
        return self.words.get(id, "").startswith(LEAVING)


def begin(job: ServerJob, seen: MembersSeen) -> Epoch | None:
    """The first view, once all are there that are to begin.

    Args:
        job: says how many.
        seen: so far.
    """
    shards, workers = seen.living(SHARD, frozenset()), seen.living(WORKER, frozenset())
    if len(shards) < job.shards or len(workers) < job.workers:
        return None
    groups = job.rule.server_groups
    ring = HashRing((m.name for m in shards.values()), groups)
    nbytes = {key: c.nbytes for key, c in job.chunks.items()}
    return Epoch(first(ring, workers, nbytes, job.copies), shards | workers)


def decide(
    job: ServerJob, nbytes: Mapping[str, int], now: Epoch, seen: MembersSeen, reports: Mapping[int, ShardReport]
) -> Epoch | WantReports | JobOver | None:
    """Next decision of the leader, from what is known of all members.

    Args:
        job: whose members they are.
        nbytes: of each key.
        now: the newest epoch.
        seen: of members.
        reports: of shards of ``now``, for the view after it.

    Returns:
        The next epoch; that reports are wanted first; that it is over; None: all is as it should be.
    """
    shards, workers = seen.living(SHARD, now.gone), seen.living(WORKER, now.gone)
    groups = job.rule.server_groups
    if groups > 1:  # what they tell each other is nobody else's to know, so none may come or go
        shards = {i: m for i, m in shards.items() if i in now.members}
    news = _news(now, seen, shards | workers)
    lost = [i for i in now.of(WORKER) if i in seen.silent]
    if lost and job.lost == FAIL:
        return JobOver(f"{news}; the job fails with a worker (lost={FAIL!r})")
    if not workers:
        return JobOver(f"no worker is left: {news}" if lost else "all workers have left")
    if groups > 1 and (shards.keys() < now.of(SHARD).keys() or any(map(seen.leaving, shards))):
        told = news or "a shard is to leave"
        return JobOver(f"{told}; groups of servers need all of their shards")
    staying = [m.name for i, m in shards.items() if not seen.leaving(i)]
    if not staying:
        return (
            JobOver(f"{news}: no shard is left") if not shards else None
        )  # the last one cannot go as long as any trains
    ring = HashRing(staying, groups)
    settled = now.view.places == place(ring, nbytes, job.copies)
    if settled and (shards | workers).keys() == now.members.keys():
        return None
    reporting = [i for i in now.of(SHARD) if i in shards]
    if any(i not in reports for i in reporting):
        return WantReports()
    going = {m.name for i, m in shards.items() if seen.leaving(i)}
    whole = {shards[i].name: reports[i].whole for i in reporting}
    clock = max((reports[i].clock for i in reporting), default=0)
    try:
        view = following(now.view, ring, workers, nbytes, whole, clock, job.copies, going)
    except PeerLost as e:
        return JobOver(f"{news}: {e}" if news else str(e), surely=False)
    used = {name for at in view.places.values() for name in at}
    done = {i for i, m in shards.items() if m.name in going and m.name not in used}
    members = {i: m for i, m in (shards | workers).items() if i not in done}
    if view is now.view and members.keys() == now.members.keys():
        return None  # somebody has yet to get what it is to own
    view = dataclasses.replace(view, number=now.view.number + 1)
    return Epoch(view, members, now.gone | (now.members.keys() - members.keys()), news)


def _news(now: Epoch, seen: MembersSeen, living: Mapping[int, Member]) -> str:
    came = [f"{m.name} ({m.where}) came" for i, m in living.items() if i not in now.members]
    went = [
        f"{m.name} ({m.where}) " + (f"is lost: silent for {seen.silent[i]:.1f} s" if i in seen.silent else "left")
        for i, m in now.members.items()
        if i not in living
    ]
    return ", ".join(went + came)
