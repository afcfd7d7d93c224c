"""What waits to leave: in order, the urgent first, and nobody held up by another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from commlib.errors import PeerLost
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.frame import Frame
from commlib.server.protocol.messages import Ack, Message, Pull, Push
from commlib.server.protocol.send_queue import SendQueue
from commlib.server.protocol.wire import unpack
from commlib.transports.inproc import InProc

WINDOW = 1 << 14


@contextlib.contextmanager
def three() -> Iterator[list[Endpoint]]:
    with contextlib.ExitStack() as stack:
        made: list[Endpoint] = [stack.enter_context(InProc(rank, window=WINDOW)) for rank in range(3)]
        for a in made:
            for b in made:
                if a is not b:
                    a.connect(b.rank, b.address)
        yield made


def push(key: str, stamp: int) -> Push:
    return Push(0, key, 0, stamp, torch.full((1000,), float(stamp)))


def next_(rows: SendQueue, me: Endpoint, of: Endpoint) -> Frame:
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(PeerLost):  # nothing comes but word of what was taken
            me.recv(timeout=0.01)
        rows.leave()
        try:
            return of.recv(timeout=0.1)
        except PeerLost:  # that word has yet to come
            assert time.monotonic() < end


def taken(rows: SendQueue, me: Endpoint, of: Endpoint, count: int) -> list[tuple[str, str, int]]:
    found = []
    for _ in range(count):
        (message,) = unpack(next_(rows, me, of).parts)
        assert isinstance(message, Push | Pull)
        found.append((type(message).__name__, message.key, getattr(message, "stamp", -1)))
    return found


def test_the_urgent_overtake_what_waits_and_all_of_a_key_stays_in_order() -> None:
    with three() as (me, other, _):
        rows = SendQueue(me, lambda rank, why: None, {"a": 0, "b": 1})
        for stamp in range(4):  # two fit into the window, and have left
            rows.put((1, push("b", stamp)))
        rows.put((1, push("a", 0)))
        rows.put((1, Pull(0, "a", 0, 1)))
        order = taken(rows, me, other, 6)
    left = [x for x in order if x[1] == "b"]
    assert left == [("Push", "b", s) for s in range(4)]
    assert order.index(("Push", "a", 0)) < order.index(("Push", "b", 3))
    assert order.index(("Push", "a", 0)) < order.index(("Pull", "a", -1))


def test_without_urgency_all_leaves_in_the_order_in_which_it_was_put() -> None:
    with three() as (me, other, _):
        rows = SendQueue(me, lambda rank, why: None)
        for stamp in range(8):
            rows.put((1, push("ba"[stamp % 2], stamp)))
        assert [stamp for _, _, stamp in taken(rows, me, other, 8)] == list(range(8))


def test_one_that_takes_nothing_holds_up_nobody_else() -> None:
    with three() as (me, _, other):
        rows = SendQueue(me, lambda rank, why: None)
        for stamp in range(20):
            rows.put((1, push("a", stamp)))
        rows.put((2, push("a", 99)))
        assert taken(rows, me, other, 1) == [("Push", "a", 99)]
        assert rows


def test_what_cannot_be_sent_is_told_once_and_dropped() -> None:
    lost: list[tuple[int, str]] = []
    with three() as (me, _, _):
        rows = SendQueue(me, lambda rank, why: lost.append((rank, why)))
        rows.put((7, push("a", 0)))
        assert not rows
        for stamp in range(20):
            rows.put((1, push("a", stamp)))
        rows.keep({2})
        assert not rows
    assert [rank for rank, _ in lost] == [7]
    assert "rank 0 has no way to rank 7" in lost[0][1]


def test_what_goes_to_one_at_a_time_is_in_as_few_frames_as_copy_nothing() -> None:
    def said(messages: list[Message]) -> str:
        return " ".join(f"{type(m).__name__}{getattr(m, 'key', '')}" for m in messages)

    with three() as (me, one, other):
        rows = SendQueue(me, lambda rank, why: None, {"a": 0, "b": 1})
        rows.put(
            (1, Ack(0, "b", 1, 0)),
            (2, Ack(0, "b", 2, 0)),
            (1, push("b", 0)),
            (1, Pull(0, "b", 0, 1)),
            (1, push("b", 1)),
            (1, Pull(0, "a", 0, 1)),
        )
        assert said(unpack(other.recv(timeout=60.0).parts)) == "Ackb"
        assert [said(unpack(one.recv(timeout=60.0).parts)) for _ in range(3)] == ["Ackb Pushb Pullb", "Pushb", "Pulla"]
