"""Who is who: conversations survive new connections, strangers become no friends, and a flood is no flood of lines."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import PeerLost
from commlib.messaging.frame import DEFAULT
from commlib.messaging.peers import CUT_OFF, Arrival, Peers
from commlib.messaging.session import Outgoing


def peers() -> Peers:
    return Peers(0, "job", DEFAULT, 1 << 20)


def hello(rank: int = 1, session: int = 7) -> tuple[Outgoing, list[bytes]]:
    out = Outgoing(rank, session=session)
    return out, [bytes(b) for b in out.frame("hello", keys=("job",))]


@pytest.mark.parametrize("rank", [0, 3, 1 << 30])
def test_who_says_that_it_is_a_rank_that_there_is_not_is_refused(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    here = Peers(0, "job", DEFAULT, 1 << 20, ranks=3)
    here.deliver(Arrival("wire", "key", hello(rank)[1]))
    assert here.refused == 1
    assert f"it says that it is rank {rank}, and there is no such other" in caplog.text
    assert list(here) == []


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_over_whatever_connections_a_conversation_goes_on(connections: list[int]) -> None:
    here, (out, first) = peers(), hello()
    here.deliver(Arrival(connections[0], "key", first))
    for clock, connection in enumerate(connections):
        here.deliver(Arrival(connection, "key", out.frame("data", clock=clock)))
    peer = here.of(1)
    assert [here.next(peer)[1].clock for _ in connections] == list(range(len(connections)))  # type: ignore[index]
    assert here.refused == 0


@pytest.mark.parametrize(
    ("identity", "session", "skip", "why"),
    [
        ("other", 7, 0, "whose key is another"),
        ("key", 8, 0, "does not go on where that rank was"),
        ("other", 7, 1, "whose key is another"),
        ("key", 8, 1, "does not go on where that rank was"),
    ],
)
def test_a_new_connection_needs_key_mark_and_number(
    identity: str, session: int, skip: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    here, (_, first) = peers(), hello()
    here.deliver(Arrival("a", "key", first))
    out, _ = hello(session=session)
    frames = [out.frame("data") for _ in range(skip + 1)]
    with caplog.at_level(logging.WARNING, "commlib"):
        here.deliver(Arrival("b", identity, frames[-1]))
    assert here.refused == 1
    assert why in caplog.text
    assert here.next(here.of(1)) is None
    assert here.cut_off == []


def test_frames_that_were_lost_with_a_connection_are_told_at_once_and_are_to_be_told_to_their_sender() -> None:
    here, (out, first) = peers(), hello()
    here.deliver(Arrival("a", "key", first))
    here.deliver(Arrival("a", "key", out.frame("data", clock=1)))
    lost, came = out.frame("data", clock=2), out.frame("data", clock=3)
    here.deliver(Arrival("b", "key", came))
    here.deliver(Arrival("b", "key", out.frame("data", clock=4)))
    peer = here.of(1)
    assert here.next(peer)[1].clock == 1  # type: ignore[index]
    with pytest.raises(PeerLost, match="rank 1 broke, and messages were lost with it: frame 3 without 2") as raised:
        here.next(peer)
    assert raised.value.cut_off
    assert [(p.rank, missed) for p, missed in here.cut_off] == [(1, "frame 3 without 2")]
    here.deliver(Arrival("a", "key", lost))  # too late
    with pytest.raises(PeerLost):
        here.next(peer)


def test_whose_messages_were_lost_is_told_so_by_their_receiver() -> None:
    here, (out, first) = peers(), hello()
    here.deliver(Arrival("a", "key", first))
    here.deliver(Arrival("a", "key", out.frame("error", note="frame 3 without 2", keys=CUT_OFF)))
    with pytest.raises(PeerLost, match="rank 1 broke, and messages were lost with it: frame 3 without 2") as raised:
        here.next(here.of(1))
    assert raised.value.cut_off


def test_of_any_peer_an_error_is_told_once_and_it_may_come_anew() -> None:
    here, (out, first) = peers(), hello()
    here.deliver(Arrival("a", None, first))
    here.deliver(Arrival("a", None, out.frame("data", clock=3)))
    here.deliver(Arrival("a", None, out.frame("error", note="out of memory")))
    found = here.next(None)
    assert found is not None
    assert found[1].clock == 3  # what came before it comes before it
    with pytest.raises(PeerLost, match="rank 1 gave up: out of memory"):
        here.next(None)
    assert here.next(None) is None
    again, first = hello(session=9)
    here.deliver(Arrival("b", None, first))
    here.deliver(Arrival("b", None, again.frame("data", clock=4)))
    assert here.next(None)[1].clock == 4  # type: ignore[index]


def test_a_flood_of_strangers_is_counted_and_logged_a_little(caplog: pytest.LogCaptureFixture) -> None:
    here = peers()
    with caplog.at_level(logging.WARNING, "commlib"):
        for n in range(1000):
            here.deliver(Arrival(n, "somebody", [b"GET / HTTP/1.1"]))
    assert here.refused == 1000
    assert 10 < len(caplog.records) < 30
    assert "refused a frame of a stranger with key somebody: not commlib's" in caplog.text
    assert "logs them no more" in caplog.text
