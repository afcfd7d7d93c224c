"""A peer's frames come in their order, each once, or it is said what is wrong; nothing is taken after that."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlib.errors import ProtocolError
from commlib.messaging.frame import Buffer, Frame, encode
from commlib.messaging.session import Incoming, Outgoing


def said(incoming: Incoming, buffers: list[Buffer]) -> str:
    with pytest.raises(ProtocolError) as e:
        incoming.take(buffers)
    return str(e.value)


@given(st.lists(st.binary(max_size=9), max_size=20), st.sampled_from(["bye", "error"]))
def test_what_one_side_says_the_other_takes_in_order_until_it_has_ended(parts: list[bytes], end: str) -> None:
    out, incoming = Outgoing(5), Incoming(5)
    sent = [out.frame("hello"), *(out.frame("data", parts=(p,)) for p in parts), out.frame(end)]
    for number, buffers in enumerate(sent):
        frame = incoming.take(buffers)
        assert (frame.sender, frame.number) == (5, number)
    assert f"a 'data' frame after {end!r}" in said(incoming, encode(Frame("data", 5, len(sent))))


@given(st.integers(1, 20), st.randoms(use_true_random=False))
def test_any_other_order_is_noticed_at_the_first_frame_that_is_out_of_it(count: int, rng: random.Random) -> None:
    out, incoming = Outgoing(0), Incoming(0)
    sent = [(i, out.frame("hello" if i == 0 else "data")) for i in range(count + 1)]
    order = [*sent]
    order.insert(rng.randrange(count + 1), rng.choice(sent))  # one twice
    rng.shuffle(order)
    for due, (number, buffers) in enumerate(order):
        if number == due:
            incoming.take(buffers)
        else:
            assert said(incoming, buffers).startswith(f"from rank 0: frame {number} ")
            break
    else:
        pytest.fail("a frame more than there are was taken")
    assert "is not listened to any more" in said(incoming, sent[0][1])


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([Frame("data", 1)], "a 'data' frame at the beginning"),
        ([Frame("bye", 1)], "a 'bye' frame at the beginning"),
        ([Frame("hello", 1), Frame("hello", 1, 1)], "a 'hello' frame after 'hello'"),
        ([Frame("hello", 1), Frame("bye", 1, 1), Frame("data", 1, 2)], "a 'data' frame after 'bye'"),
        ([Frame("error", 1), Frame("hello", 1, 1)], "a 'hello' frame after 'error'"),
        ([Frame("hello", 2)], "a frame of rank 2"),
        ([Frame("hello", 1), Frame("data", 1, 0)], "frame 0 once more, where 1 is due"),
        ([Frame("hello", 1), Frame("data", 1, 2)], "frame 2 without 1"),
        ([Frame("hello", 1), Frame("data", 1, 5)], "frame 5 without 1 to 4"),
    ],
)
def test_what_may_not_come_now_is_refused(frames: list[Frame], why: str) -> None:
    incoming = Incoming(1)
    *good, bad = frames
    for frame in good:
        incoming.take(encode(frame))
    assert said(incoming, encode(bad)).startswith(f"from rank 1: {why}")


def test_nobody_can_send_what_the_other_side_would_not_take() -> None:
    out = Outgoing(0)
    with pytest.raises(ValueError, match="a 'data' frame at the beginning"):
        out.frame("data")
    out.frame("hello")
    with pytest.raises(ValueError, match="it has 1 parts"):
        out.frame("bye", parts=(b"",))
    assert Outgoing(0).frame("hello") == encode(Frame("hello", 0))
    out.frame("bye")
    with pytest.raises(ValueError, match="a 'data' frame after 'bye'"):
        out.frame("data")


def test_a_damaged_frame_ends_it_and_names_the_peer() -> None:
    incoming = Incoming(7)
    assert said(incoming, [b"HTTP/1.1 400"]).startswith("from rank 7: not commlib's")
    assert said(incoming, Outgoing(7).frame("hello")).startswith("rank 7 is not listened to any more: not commlib's")
