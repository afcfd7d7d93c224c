"""However frames are sent and taken: what waits is bounded, nobody waits for ever, and lies are noticed."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import ProtocolError
from commlib.messaging.flow_control import CreditReceiver, CreditSender, cost


def frame(size: int) -> int:
    """What one of so many bytes takes of the window."""
    return cost((bytes(size),))


@given(st.integers(1, 50_000), st.lists(st.integers(0, 30_000), max_size=60), st.data())
def test_what_waits_is_bounded_and_a_reader_that_reads_gets_all(
    window: int, sizes: list[int], data: st.DataObject
) -> None:
    sender, receiver = CreditSender(window), CreditReceiver(window)
    todo, wire = collections.deque(map(frame, sizes)), collections.deque[int]()
    while todo or wire:
        go = bool(todo) and sender.admits(todo[0])
        if not go and not wire:
            pytest.fail("the sender waits, and there is nothing to take: for ever")
        if go and (not wire or data.draw(st.booleans())):
            sender.sent(todo[0])
            receiver.came(todo[0])
            wire.append(todo.popleft())
        else:
            total = receiver.take(wire.popleft())
            if total is not None:
                sender.taken(total)
        assert sum(wire) <= sender.waiting <= window + max(map(frame, sizes))


def test_empty_frames_count_too() -> None:
    sender, sent = CreditSender(100_000), 0
    while sender.admits(frame(0)) and sent < 1000:
        sender.sent(frame(0))
        sent += 1
    assert sent < 100


def test_who_sends_without_credit_is_accused_at_the_first_frame_too_many() -> None:
    receiver = CreditReceiver(100_000)
    receiver.came(frame(48_096))
    receiver.came(frame(48_096))
    with pytest.raises(ProtocolError, match="it sends on, with 98240 bytes that have not been taken: 100000 may wait"):
        receiver.came(frame(48_096))


def test_a_frame_that_did_not_go_takes_no_credit() -> None:
    sender = CreditSender(4000)
    for _ in range(100):
        sender.sent(frame(1000))
        sender.kept(frame(1000))
    assert sender.waiting == 0


@pytest.mark.parametrize("totals", [[3000], [2000, 1000], [-1]])
def test_a_peer_that_has_taken_more_than_was_sent_or_less_than_before_lies(totals: list[int]) -> None:
    sender = CreditSender()
    sender.sent(frame(1000))
    for total in totals[:-1]:
        sender.taken(total)
    with pytest.raises(ProtocolError, match="it has taken"):
        sender.taken(totals[-1])
