"""Messages of keys and values over an endpoint: through filters and back, and with keys that must be asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgpack
import pytest
import torch

from commlib.bench.results.socket_counters import traffic
from commlib.bench.sparse_logistic.byte_counters import InThreads, OverTcp, nbytes
from commlib.bench.sparse_logistic.mail import Mail
from commlib.bench.sparse_logistic.protocol import Kind, Line, Message
from commlib.codecs.filter import Content, chain
from commlib.errors import PeerLost, ProtocolError
from commlib.messaging.frame import Frame

SIZE = 5000
Ends = tuple[InThreads, InThreads]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(InThreads(rank)) for rank in range(2))
        a.connect(1, b.address)
        b.connect(0, a.address)
        yield a, b


def pair(ends: Ends, filters: str = "none", reading: str | None = None) -> tuple[Line, Line]:
    made = chain(filters)
    return Line(ends[0], 1, SIZE, made, 0), Line(
        ends[1], 0, SIZE, made, 1, reading=None if reading is None else chain(reading)
    )


def content(n: int, seed: int = 0) -> Content:
    draws = torch.Generator().manual_seed(seed)
    return Content(torch.randperm(SIZE, generator=draws)[:n].sort().values, torch.randn(n, generator=draws))


def next_of(line: Line, end: InThreads) -> Message:
    (message,) = line.take(end.recv())
    return message


def check_same(a: Content, b: Content) -> None:
    assert a.keys is not None
    assert b.keys is not None
    assert torch.equal(a.keys, b.keys)
    assert torch.equal(a.values, b.values)


@pytest.mark.parametrize("spec", ["none", "key_cache", "lossless", "key_cache+lossless"])
def test_what_is_sent_comes_back_bit_for_bit_and_an_empty_content_too(ends: Ends, spec: str) -> None:
    a, b = pair(ends, spec)
    for turn, n in enumerate([300, 300, 1, 0, 40]):
        first, second = content(n, turn // 2), content(n, turn + 10)
        a.send(Kind.PUSH, turn, [first, second], numbers=[turn, 0.5, True])
        came = next_of(b, ends[1])
        assert (came.kind, came.clock, came.numbers) == (Kind.PUSH, turn, [turn, 0.5, True])
        check_same(came.content(0), first)
        check_same(came.content(1), second)


def test_a_code_of_values_errs_by_less_than_its_bin(ends: Ends) -> None:
    a, b = pair(ends, "key_cache+fixed_float:nbytes=2+lossless")
    given = content(1000)
    a.send(Kind.PULL, 0, [given])
    got = next_of(b, ends[1]).content(0)
    bin_width = float(given.values.max() - given.values.min()) / (2**16 - 2)
    assert float((got.values - given.values).abs().max()) <= 1.001 * bin_width


def test_keys_of_two_contents_are_sent_once_and_all_bytes_are_counted(ends: Ends) -> None:
    a, _ = pair(ends)
    before, one = ends[0].sent, content(1000)
    a.send(Kind.PUSH, 0, [one, Content(one.keys, one.values + 1)])
    frame = ends[1].recv()
    assert nbytes(frame.parts) - (8 + 4 + 4) * 1000 < 40
    assert 0 < ends[0].sent - before - nbytes(frame.parts) < 60  # the frame's header


def test_what_is_counted_is_what_the_sockets_send_but_for_what_zeromq_adds_to_parts() -> None:
    with OverTcp(0) as a, OverTcp(1) as b:
        a.connect(1, b.address)
        b.connect(0, a.address)
        line, other = Line(a, 1, SIZE, chain("none"), 0), Line(b, 0, SIZE, chain("none"), 1)
        line.send(Kind.PUSH, 0, [content(3)])
        other.send(Kind.PULL, 0, [content(3)])
        other.take(b.recv())
        line.take(a.recv())  # connected, and all greetings said
        before, counted = traffic(), a.sent
        for turn in range(1, 41):
            line.send(Kind.PUSH, turn, [content(1000)])
            other.take(b.recv())
        after, counted = traffic(), a.sent - counted
    if before is None or after is None:
        pytest.skip("this system does not count what sockets send")
    assert counted > 40 * 12_000
    assert (
        0 <= (after - before).sent - counted <= 40 * 4 * 9
    )  # of a frame four parts: head, message's head, two tensors


def test_keys_that_are_not_known_any_more_are_asked_for_and_nothing_is_lost_or_overtaken(ends: Ends) -> None:
    """The receiver keeps one list of keys for a channel, the sender eight: so three in turn are all forgotten."""
    a, b = pair(ends, "key_cache:entries=8+lossless", reading="key_cache:entries=1+lossless")
    given = [content(200, seed=turn % 3) for turn in range(9)]
    for turn, each in enumerate(given):
        a.send(Kind.PUSH, turn, [each])
    came: list[Message] = []
    for _ in given:
        came += b.take(ends[1].recv())
    assert len(came) == 3
    while len(came) < len(given):
        assert a.take(ends[0].recv()) == []
        came += b.take(ends[1].recv())
    assert [m.clock for m in came] == list(range(9))
    for each, message in zip(given, came, strict=True):
        check_same(message.content(0), each)
    assert b.asked == 6


def test_keys_that_both_sides_have_forgotten_are_an_error_that_says_what_to_raise(ends: Ends) -> None:
    a, b = pair(ends, "key_cache:entries=1", reading="key_cache:entries=1")
    given = content(10, 0)
    a.send(Kind.PUSH, 0, [given])
    a.send(Kind.PUSH, 1, [given])
    a.send(Kind.PUSH, 2, [content(10, 1)])
    ends[1].recv()  # the first is lost: without it the second has a signature that says nothing
    assert b.take(ends[1].recv()) == []
    with pytest.raises(ProtocolError, match="give key_cache more entries"):
        a.take(ends[0].recv())


def frame(*parts: bytes, kind: int = Kind.PUSH) -> Frame:
    return Frame("data", 0, clock=3, flags=kind, parts=parts)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: frame(b"\xc1"), "cannot be read"),
        (lambda: frame(), "cannot be read"),
        (lambda: frame(msgpack.packb([1, 2])), "whose head is not numbers and contents"),
        (lambda: frame(msgpack.packb([[], []]), kind=77), "unknown kind 77"),
        (lambda: frame(msgpack.packb([[], []]), b"more"), "1 parts that no content needs"),
        (lambda: frame(msgpack.packb([[], [None] * 3])), "3 contents, 2 can be"),
        (lambda: frame(msgpack.packb([[], ["x"]])), "without notes and forms"),
        (lambda: frame(msgpack.packb([[], [[[], 1, 1]]]), bytes(8)), "whose part is missing"),
        (lambda: frame(msgpack.packb([[], [[[], 3, 1]]]), bytes(8)), "without keys or values"),
        (lambda: frame(msgpack.packb([[], [[[], 1, 1]]]), bytes(7), bytes(4)), "7 bytes are no row of torch.int64"),
        (lambda: frame(msgpack.packb([[], [[[], 1, 1]]]), bytes(16), bytes(8)), "keys are not ascending"),
        (lambda: frame(msgpack.packb([[], [[[5], 1, 1]]]), bytes(8), bytes(4)), "1 notes, none leaves 0"),
        (lambda: frame(msgpack.packb([[9, b""], []]), kind=Kind.ASK), "without a channel and a signature"),
        (lambda: frame(msgpack.packb([[0, b"", b"123"], []]), kind=Kind.KEYS), "what are no keys"),
    ],
)
def test_what_is_no_message_is_refused_with_what_is_wrong(ends: Ends, made: Callable[[], Frame], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        pair(ends)[1].take(made())


def test_who_has_not_come_in_time_is_named_and_who_sent_ahead_is_not(ends: Ends) -> None:
    a, b = pair(ends)
    mail = Mail(ends[1], {0: b}, timeout=60.0)
    a.send(Kind.REPORT, 2, numbers=[2.0])
    a.send(Kind.REPORT, 1, numbers=[1.0])
    assert [m.numbers for m in mail.gather(Kind.REPORT, 1, [0], "first")] == [[1.0]]
    assert [m.numbers for m in mail.gather(Kind.REPORT, 2, [0], "second")] == [[2.0]]
    brief = Mail(ends[1], {0: b}, timeout=0.3)
    with pytest.raises(PeerLost, match=r"rank 1 has no third from rank 0, 7: nothing came for 0.3 s"):
        brief.gather(Kind.REPORT, 3, [0, 7], "third")
    ends[0].abort("the roof leaks")
    with pytest.raises(PeerLost, match="rank 1 has no fourth from rank 0; rank 0 gave up: the roof leaks"):
        mail.gather(Kind.REPORT, 4, [0], "fourth")
