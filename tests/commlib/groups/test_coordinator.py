"""Reviews at one store, a thread a rank: all get rank 0's decision, old keys go, and who is missing is named."""

from __future__ import annotations

import datetime
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from commlib.errors import PeerLost
from commlib.groups.coordinator import Coordinator
from commlib.groups.world import World

PATIENT = 60.0  # seconds: nobody is missing
Posts = Sequence[Mapping[str, Any]]


class Group:
    """As much of a process group as a board needs."""

    def __init__(self) -> None:
        self.store = torch._C._distributed_c10d.HashStore()

    def get_group_store(self) -> Any:
        return self.store

    def posted(self, ranks: Sequence[int]) -> None:
        """Returns when these ranks have posted for the first review, however slow the machine is."""
        for rank in ranks:
            self.store.wait([f"model/review/0/{rank}"], datetime.timedelta(seconds=PATIENT))


def on_ranks(ranks: Sequence[int], job: Callable[[int], Any]) -> list[Any]:
    """What ``job(rank)`` returns or raises, each in a thread of its own."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        tasks = [pool.submit(job, rank) for rank in ranks]
        return [task.exception() or task.result() for task in tasks]


def never(posts: Posts) -> dict[str, Any]:
    raise AssertionError("only rank 0 decides, and only when all have posted")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_ranks_get_what_rank_0_made_of_all_posts_in_fifty_reviews(size: int) -> None:
    group = Group()

    def job(rank: int) -> list[dict[str, Any]]:
        board, chance = Coordinator(group, "model", World(rank, size), PATIENT), random.Random(rank)
        got = []
        for n in range(50):
            time.sleep(chance.choice([0, 0, 0.001, 0.004]))  # nobody is always first, or last
            mine = {"rank": rank, "n": n}
            got.append(board.review(mine, lambda posts: {"posts": list(posts)} if rank == 0 else never(posts)))
        return got

    expected = [{"posts": [{"rank": r, "n": n} for r in range(size)]} for n in range(50)]
    assert on_ranks(range(size), job) == [expected] * size
    assert group.store.num_keys() == size + 1  # of the last review: one post a rank, and the decision
    assert all(group.store.check([f"model/review/49/{what}"]) for what in (*range(size), "decision"))


def test_boards_with_other_keys_do_not_meet() -> None:
    group = Group()

    def job(rank: int) -> list[Any]:
        a, b = (Coordinator(group, key, World(rank, 2), PATIENT) for key in "ab")
        return [
            board.review({"n": n}, lambda posts: {"n": [p["n"] for p in posts]}) for n, board in enumerate((a, b, a))
        ]

    assert on_ranks([0, 1], job) == [[{"n": [n, n]} for n in range(3)]] * 2


@pytest.mark.parametrize(("others", "missing"), [([2], "rank 1"), ([1], "rank 2"), ([], "ranks 1, 2")])
def test_ranks_that_do_not_come_are_named_within_the_timeout(others: list[int], missing: str) -> None:
    group = Group()

    def job(rank: int) -> None:
        board = Coordinator(group, "model", World(rank, 3), 0.2 if rank == 0 else 600.0)
        if rank == 0:
            group.posted(others)
        with pytest.raises(PeerLost) as lost:
            board.review({}, never)
        assert f"no figures of {missing} within 0.2 s" in str(lost.value)  # rank 0 has told the others

    assert on_ranks([0, *others], job) == [None] * (1 + len(others))


def test_a_rank_that_leaves_between_reviews_is_missed_at_the_next() -> None:
    group = Group()

    def job(rank: int) -> dict[str, Any]:
        board = Coordinator(group, "model", World(rank, 2), PATIENT if rank else 0.2)
        if rank == 0:
            group.posted([1])
        decision = board.review({}, lambda posts: {"ranks": len(posts)})
        return decision if rank else board.review({}, never)

    lost, decision = on_ranks([0, 1], job)
    assert decision == {"ranks": 2}
    assert isinstance(lost, PeerLost)
    assert str(lost) == "review 1: no figures of rank 1 within 0.2 s"


def test_without_rank_0_the_others_say_what_they_wait_for() -> None:
    group = Group()
    lost = on_ranks([1, 2], lambda rank: Coordinator(group, "model", World(rank, 3), 0.2).review({}, never))
    for rank, e in zip([1, 2], lost, strict=True):
        assert isinstance(e, PeerLost)
        assert f"review 0: rank 0 has not decided within 0.2 s (this is rank {rank} of 3)" in str(e)


def test_what_goes_wrong_in_deciding_is_raised_at_rank_0() -> None:
    with pytest.raises(AssertionError, match="only rank 0 decides"):
        Coordinator(Group(), "model", World(0, 1), PATIENT).review({}, never)
