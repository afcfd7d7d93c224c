"""Ranks that agree, that differ, that fail, and that are called; and the store behind a group on every torch."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch.distributed as dist

from commlib.errors import PeerLost, PlanMismatch
from commlib.groups import handshake
from commlib.groups.handshake import (
    agree,
    answer_roll_call,
    explained,
    meeting_place,
    publish_failure,
    roll_call,
    share,
    tell,
)
from commlib.groups.store import store_of
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.thread_groups import each, new_store

ENDLESS_S = 600.0
"""A deadline that no test waits for: pytest's own is shorter."""


def without_get_group_store(world: World) -> tuple[bytes, str]:
    """As in torch 2.7, whose groups do not know their store."""
    group = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist.ProcessGroup, "get_group_store", raising=False)
        store_of(group).set(f"here/{world.rank}", str(world.rank))
        agree(group, key := meeting_place(group, world), {"a": "1"}, world, 20.0)
        return store_of(group).get(f"here/{1 - world.rank}"), key


def test_ranks_agree_where_a_group_does_not_know_its_store(fleet: Fleet) -> None:
    assert fleet.run(2, without_get_group_store) == [(b"1", "commlib/1"), (b"0", "commlib/1")]


def in_one_process() -> Any:
    """As much of a process group as a handshake asks for; ranks are threads, or come one after another."""
    store = new_store()
    return types.SimpleNamespace(get_group_store=lambda: store)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_every_rank_hears_that_one_differs_whichever_it_is(odd: int) -> None:
    group, worlds = in_one_process(), [World(rank, 3) for rank in range(3)]

    def ask(world: World) -> str:
        with pytest.raises(PlanMismatch) as e:
            agree(group, "k", {"codec": "onebit" if world.rank == odd else "int8"}, world, 20.0)
        return str(e.value)

    for rank, words in enumerate(each(worlds, ask)):
        other = next(r for r in range(3) if (r == odd) != (rank == odd))
        mine, theirs = ("onebit", "int8") if rank == odd else ("int8", "onebit")
        assert words.endswith(f"codec: rank {rank} has {mine!r}, rank {other} has {theirs!r}")


def test_a_rank_that_fails_before_it_has_said_anything_is_heard_by_those_who_wait_for_it() -> None:
    group = in_one_process()
    publish_failure(group, "k", World(1, 2), ValueError("no such codec"))
    with pytest.raises(PlanMismatch, match=r"rank 1 failed to attach \(this is rank 0\): no such codec"):
        share(group, "k", {"host": "a"}, World(0, 2), 0.5)
    with pytest.raises(PlanMismatch, match=r"rank 1 failed to attach \(this is rank 0\): no such codec"):
        agree(group, "k", {"codec": "int8"}, World(0, 2), 0.5)


def test_what_a_rank_has_said_before_it_failed_still_stands_for_those_who_read_it_later() -> None:
    group = in_one_process()
    tell(group, "k", {"host": "b"}, World(1, 2))
    publish_failure(group, "k", World(1, 2), ValueError("no such codec"))
    assert share(group, "k", {"host": "a"}, World(0, 2), 0.5) == [{"host": "a"}, {"host": "b"}]
    with pytest.raises(PlanMismatch, match="no such codec"):
        agree(group, "k", {"codec": "int8"}, World(0, 2), 0.5)


def test_who_has_waited_before_anybody_called_has_not_answered_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "ROLL_CALL_S", 0.1)
    group = in_one_process()
    assert answer_roll_call(group, "k", World(1, 2)) == ""
    assert answer_roll_call(group, "k", World(1, 2)) == ""
    assert roll_call(group, "k", World(0, 2)) == "rank 1 did not answer a roll call"
    assert answer_roll_call(group, "k", World(1, 2)) == "rank 1 did not answer a roll call"  # it is over
    assert roll_call(group, "k", World(0, 2)) == "all ranks still answer a roll call"


def test_a_rank_that_the_group_knows_to_be_gone_is_not_waited_for_unless_it_has_said_its_word() -> None:
    group, world = in_one_process(), World(0, 3)
    group.peers_gone = lambda: {2: "rank 2 has said goodbye"}
    said = r"rank 2 of 3 did not attach and will not: rank 2 has said goodbye \(this is rank 0\)"
    tell(group, "k", {"host": "b"}, World(1, 3))
    with pytest.raises(PeerLost, match=said):
        share(group, "k", {"host": "a"}, world, ENDLESS_S)
    tell(group, "k", {"host": "c"}, World(2, 3))
    assert share(group, "k", {"host": "a"}, world, ENDLESS_S) == [{"host": "a"}, {"host": "b"}, {"host": "c"}]


def test_what_a_rank_says_while_others_learn_that_it_is_gone_counts_and_so_does_the_deadline() -> None:
    group, word = in_one_process(), {"host": "a"}
    tell(group, "k", word, World(0, 2))

    def gone() -> dict[int, str]:
        tell(group, "k", word, World(1, 2))
        return {1: "rank 1 has said goodbye"}

    group.peers_gone = gone
    store = store_of(group)
    assert handshake.wait_for_all(store, "k/self", World(0, 2), ENDLESS_S, group) == []
    group.peers_gone = lambda: {1: "rank 1 has said goodbye"}
    assert handshake.wait_for(store, {0: "k/not"}, 0.1, group) == [0]


@pytest.mark.parametrize("kind", [RuntimeError, PeerLost])
def test_an_error_of_a_backend_is_told_with_who_is_missing(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshake, "ROLL_CALL_S", 0.1)
    group = in_one_process()
    said = explained(group, "k", World(0, 2), kind("timed out"))
    assert caplog.messages == ["rank 0: timed out; asking which ranks are still there"]  # before, for torchrun's sake
    assert said == "timed out; rank 1 did not answer a roll call"
    known = "rank 0: timed out; " if kind is PeerLost else ""  # nobody else may know what we have found out
    assert answer_roll_call(group, "k", World(1, 2)) == f"{known}rank 1 did not answer a roll call"


def test_an_error_that_has_called_the_roll_is_left_for_the_others_as_it_is() -> None:
    group, error = in_one_process(), PeerLost("nothing came from rank 1; rank 1 did not answer a roll call")
    error.roll_called = True
    assert explained(group, "k", World(0, 3), error) == str(error)
    assert answer_roll_call(group, "k", World(2, 3)) == f"rank 0: {error}"
