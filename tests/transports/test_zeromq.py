"""ZeroMQ endpoints refuse whom they should, in words; a cut is mended, and what is lost in one is no hang."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import zmq

from commlib.errors import AuthenticationError, CommlibError, PeerLost
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.frame import Frame, Limits, encode
from commlib.messaging.keys import KeyPair
from commlib.transports import zeromq_monitor
from commlib.transports.zeromq import ZeroMQ
from tests.support.leaks import resident
from tests.support.server_cluster import until
from tests.support.thread_groups import Wire

ENDLESS_S = 600.0
"""A deadline that no test waits for: pytest's own is shorter."""

MINE, YOURS, STRANGERS = (KeyPair.new() for _ in range(3))


@contextlib.contextmanager
def two(**options: object) -> Iterator[tuple[Endpoint, Endpoint]]:
    with ZeroMQ(0, **options) as a, ZeroMQ(1, **options) as b:  # type: ignore[arg-type]
        a.connect(1, b.address)
        b.connect(0, a.address)
        yield a, b


def refuses(b: Endpoint, peer: int | None, said: str, frames: int = 1) -> None:
    """Nothing comes, and meanwhile so many frames are refused; a minute is for a machine with much else to do."""
    end = time.monotonic() + 60
    while True:
        with pytest.raises(PeerLost, match=said):
            b.recv(peer, timeout=0.2)
        if b.refused >= frames:
            return
        assert time.monotonic() < end, f"{b.refused} frames were refused, not {frames}"


@contextlib.contextmanager
def two_with_keys() -> Iterator[tuple[ZeroMQ, ZeroMQ]]:
    with ZeroMQ(0, keys=MINE, allowed=[YOURS.public]) as a, ZeroMQ(1, keys=YOURS, allowed=[MINE.public]) as b:
        a.connect(1, b.address, key=YOURS.public)
        b.connect(0, a.address, key=MINE.public)
        a.send(1, clock=1)
        assert b.recv(0, timeout=60).clock == 1
        yield a, b
        a.send(1, clock=2)  # whatever was tried, it goes on
        assert b.recv(0, timeout=60).clock == 2


def test_beyond_this_machine_it_wants_keys_or_to_be_told_that_none_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AuthenticationError, match="beyond this machine, without keys"):
        ZeroMQ(0, host="0.0.0.0")
    with caplog.at_level(logging.WARNING, "commlib"), ZeroMQ(0, host="0.0.0.0", insecure=True):
        assert "anyone there can read and send" in caplog.text
    with ZeroMQ(0) as a, pytest.raises(AuthenticationError, match=r"rank 1 at tcp://10\.0\.0\.1:5 is beyond"):
        a.connect(1, "tcp://10.0.0.1:5")


def test_a_port_in_use_is_named() -> None:
    with ZeroMQ(0) as a, pytest.raises(CommlibError, match=r"rank 1 cannot listen at 127\.0\.0\.1 port \d+: Address"):
        ZeroMQ(1, port=int(a.address.rpartition(":")[2]))


@pytest.mark.parametrize(
    "address", ["", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://h:99999", "http://h:1"]
)
def test_a_bad_address_is_refused(address: str) -> None:
    with ZeroMQ(0) as a, pytest.raises(ValueError, match="an address is tcp://host:port"):
        a.connect(1, address)


def test_keys_are_for_both_or_for_none_and_are_keys() -> None:
    with ZeroMQ(0) as a, pytest.raises(AuthenticationError, match="and rank 0 has none itself"):
        a.connect(1, "tcp://127.0.0.1:5", key=YOURS.public)
    with ZeroMQ(0, keys=MINE) as a:
        with pytest.raises(AuthenticationError, match="no key is given"):
            a.connect(1, "tcp://127.0.0.1:5")
        with pytest.raises(ValueError, match="a public key is 40 characters of Z85"):
            a.connect(1, "tcp://127.0.0.1:5", key="short")
        with pytest.raises(ValueError, match="no way to rank 1"):
            a.send(1)


def test_one_without_a_key_gets_nowhere() -> None:
    with two_with_keys() as (_, b), ZeroMQ(5) as stranger:
        with contextlib.suppress(PeerLost):  # it may have been turned away by the time it says hello, or later
            stranger.connect(1, b.address)
            stranger.send(1, clock=99)
        with pytest.raises(PeerLost, match="nothing came from rank 5: it has never said hello"):
            b.recv(5, timeout=1)


def test_one_whose_key_is_not_allowed_gets_nowhere_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "commlib")
    with two_with_keys() as (_, b), ZeroMQ(5, keys=STRANGERS) as stranger:
        with pytest.raises(PeerLost, match="rank 1 has refused the connection of rank 5: does it allow "):
            _send_until_told(stranger, b, key=YOURS.public)
        assert f"turned away one with key {STRANGERS.public}, which is not allowed here" in caplog.text


def test_one_who_may_send_may_not_do_so_as_another_rank() -> None:
    guests = [k.public for k in (MINE, YOURS, STRANGERS)]
    with ZeroMQ(1, keys=YOURS, allowed=guests) as b, ZeroMQ(0, keys=STRANGERS) as pretender:
        b.connect(0, "tcp://127.0.0.1:9", key=MINE.public)
        pretender.connect(1, b.address, key=YOURS.public)
        refuses(b, 0, "it has never said hello")
        assert b.refused == 1
        pretender.close(0.1)
        b.close(0.1)
    with ZeroMQ(1, keys=YOURS, allowed=guests) as b, ZeroMQ(0, keys=STRANGERS) as pretender:
        pretender.connect(1, b.address, key=YOURS.public)
        pretender.send(1)
        b.recv(0, timeout=60)
        with pytest.raises(AuthenticationError, match="what said hello as rank 0 has key"):
            b.connect(0, "tcp://127.0.0.1:9", key=MINE.public)
        pretender.close(0.1)


def _send_until_told(stranger: Endpoint, b: Endpoint, key: str | None = None) -> None:
    stranger.connect(1, b.address, key=key)  # it may be told at its hello already
    for _ in range(300):  # a minute
        stranger.send(1, clock=99)
        with pytest.raises(PeerLost, match="nothing came from rank 5: it has never said hello"):
            b.recv(5, timeout=0.2)


def test_a_server_with_another_key_than_was_told_gets_nothing() -> None:
    with ZeroMQ(1, keys=STRANGERS, allowed=[MINE.public]) as impostor, ZeroMQ(0, keys=MINE) as a:
        a.connect(1, impostor.address, key=YOURS.public)
        a.send(1, parts=(b"secret",))
        with pytest.raises(PeerLost, match="nothing came from any rank"):
            impostor.recv(timeout=1)
        a.close(0.1)


def test_one_that_speaks_http_and_one_that_floods_disturb_nobody() -> None:
    with two() as (a, b):
        host, _, port = b.address.removeprefix("tcp://").rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=60) as tcp:
            tcp.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        context = zmq.Context()
        flood = context.socket(zmq.DEALER)
        flood.connect(b.address)
        for i in range(2000):
            flood.send_multipart([b"cml\x01" + bytes([i % 256]), bytes(100)])
        for clock in range(10):
            a.send(1, clock=clock)
        assert [b.recv(0, timeout=60).clock for _ in range(10)] == list(range(10))
        refuses(b, 0, "nothing came")
        context.destroy(0)


@pytest.mark.parametrize(("secret", "password"), [("ours", None), ("ours", b"guessed"), ("", None)])
def test_nothing_is_kept_of_one_that_does_not_know_the_secret(secret: str, password: bytes | None) -> None:
    with two(secret=secret) as (a, b):
        context, large, before = zmq.Context(), bytes(1 << 26), resident()
        ways = [context.socket(zmq.DEALER) for _ in range(2)]
        for way in ways:
            if password is not None:
                way.plain_username, way.plain_password = b"commlib", password
            way.connect(b.address)
            with contextlib.suppress(zmq.Again):  # it has been refused already
                way.send_multipart([large] * 2, zmq.DONTWAIT, copy=False)
        if secret:
            for _ in range(20):  # meanwhile nobody takes anything
                time.sleep(0.05)
                assert resident() - before < 1 << 24
        else:  # a bare endpoint takes what comes, and refuses it when it reads it
            until(lambda: resident() - before > 1 << 24)
        a.send(1, clock=5)
        assert b.recv(0, timeout=60).clock == 5
        context.destroy(0)


def test_an_endpoint_with_another_secret_is_told_that_it_is_refused() -> None:
    refused = pytest.raises(PeerLost, match="rank 1 has refused the connection of rank 5")
    with two(secret="ours") as (_, b), ZeroMQ(5, secret="theirs") as stranger, refused:
        _send_until_told(stranger, b)


@pytest.mark.parametrize("hosts", [("127.0.0.2", "127.0.0.3"), ("127.0.0.2/31",)])
def test_connections_of_hosts_that_are_none_of_the_peers_end_at_once_however_many(hosts: tuple[str, ...]) -> None:
    with ZeroMQ(0, host="127.0.0.2", hosts=hosts) as a, ZeroMQ(1, host="127.0.0.3", hosts=hosts) as b:
        a.connect(1, b.address)
        b.connect(0, a.address)
        a.send(1, clock=1)
        assert b.recv(0, timeout=60).clock == 1
        host, _, port = b.address.removeprefix("tcp://").rpartition(":")
        held = len(os.listdir("/proc/self/fd"))
        with contextlib.ExitStack() as stack:
            strangers = [
                stack.enter_context(socket.create_connection((host, int(port)), 60, ("127.0.0.9", 0)))
                for _ in range(300)
            ]
            assert {s.recv(1) for s in strangers} == {b""}, "one heard a greeting"
            until(lambda: len(os.listdir("/proc/self/fd")) - held <= 300)  # the endpoint holds none of them
        with ZeroMQ(2, host="127.0.0.9", hosts=hosts) as stranger:
            with contextlib.suppress(PeerLost):
                stranger.connect(1, b.address)
                stranger.send(1, clock=5)
            a.send(1, clock=2)
            assert b.recv(timeout=60).clock == 2
            with pytest.raises(PeerLost, match="nothing came from any rank"):
                b.recv(timeout=0.5)
            stranger.close(0.1)


@pytest.mark.parametrize("bad", ["a name", "10.0.0.1/24", "10.0.0.300", ""])
def test_hosts_are_addresses_or_networks(bad: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"networks such as 10.0.0.0/24, got {bad!r}")):
        ZeroMQ(0, hosts=[bad])


def test_a_frame_that_is_sent_again_is_refused_on_another_connection_and_ends_its_own() -> None:
    context = zmq.Context()
    with ZeroMQ(1) as b:
        ways = [context.socket(zmq.DEALER) for _ in range(2)]
        for way in ways:
            way.connect(b.address)
        sent = [encode(Frame("hello", 0, keys=("",), session=7)), encode(Frame("data", 0, 1, clock=5, session=7))]
        for buffers in sent:
            ways[0].send_multipart(buffers)
        assert b.recv(0, timeout=60).clock == 5
        for buffers in [*sent, encode(Frame("data", 0, 2, session=8))]:  # and one of a mark that was guessed
            ways[1].send_multipart(buffers)
        refuses(b, 0, "nothing came", frames=3)
        assert b.refused == 3
        ways[0].send_multipart(sent[1])
        with pytest.raises(PeerLost, match="frame 1 once more, where 2 is due"):
            b.recv(0, timeout=60)
    context.destroy(0)


def test_a_bad_frame_is_refused_and_takes_no_credit() -> None:
    with two(window=4096) as (a, b):
        for _ in range(50):
            with pytest.raises(ValueError, match="float32 of shape"):
                a.send(1, dtype="float32", shape=(9,), parts=(bytes(3000),))
        a.send(1, clock=5, timeout=60)
        assert b.recv(0, timeout=60).clock == 5


def test_a_peer_that_heeds_no_credit_is_named() -> None:
    context = zmq.Context()
    with ZeroMQ(1, window=1 << 16) as b:
        way = context.socket(zmq.DEALER)
        way.connect(b.address)
        way.send_multipart(encode(Frame("hello", 0, keys=("",), session=7)))
        for number in range(1, 200):
            way.send_multipart(encode(Frame("data", 0, number, session=7, parts=(bytes(10_000),))))
        with pytest.raises(PeerLost, match="from rank 0: it sends on"):
            _take_all(b)
    context.destroy(0)


def _take_all(b: Endpoint) -> None:
    for _ in range(200):
        b.recv(0, timeout=60)


@pytest.mark.parametrize(
    ("buffers", "said"),
    [
        ([b"cml\x02" + bytes(9)], "version 02 of the wire format"),
        ([b"cml\x01\x9b"], "a header that cannot be read"),
        (encode(Frame("data", 0, 2, session=7)), "frame 2 without 1"),
        ([*encode(Frame("data", 0, 1, session=7)), *[b""] * 9], "it has 9 parts, of which 8 are allowed"),
        (encode(Frame("data", 0, 1, session=7, parts=(bytes(2000),))), "it has 2000 bytes, of which 1000 are allowed"),
    ],
)
def test_what_a_peer_must_not_send_is_told_by_name(buffers: list[bytes], said: str) -> None:
    context = zmq.Context()
    with ZeroMQ(1, limits=Limits(nbytes=1000)) as b:
        way = context.socket(zmq.DEALER)
        way.connect(b.address)
        way.send_multipart(encode(Frame("hello", 0, keys=("",), session=7)))
        way.send_multipart(buffers)
        seconds = 60.0
        if "2000 bytes" in said:  # ZeroMQ ends the connection before it is read
            said, seconds = "nothing came from rank 0", 2.0
        with pytest.raises(PeerLost, match=said):
            b.recv(0, timeout=seconds)
    context.destroy(0)


def test_after_a_cut_of_an_idle_wire_all_goes_on_and_of_a_busy_one_nothing_is_lost_without_a_word() -> None:
    with ZeroMQ(0) as a, ZeroMQ(1) as b, contextlib.closing(Wire(b.address)) as wire:
        a.connect(1, wire.address)
        b.connect(0, a.address)
        for i in range(3):  # idle: all that was sent has come
            a.send(1, clock=i)
            assert b.recv(0, timeout=60).clock == i
            wire.cut()
        a.send(1, clock=3)
        assert b.recv(0, timeout=60).clock == 3
        came, clock = [], 0
        with contextlib.suppress(PeerLost):
            for clock in range(4, 400):
                a.send(1, clock=clock, parts=(bytes(50_000),), timeout=2)
                if clock % 50 == 0:
                    wire.cut()
                came.append(b.recv(0, timeout=2).clock)
        assert came == list(range(4, 4 + len(came)))


@pytest.mark.parametrize(
    ("through_a_wire", "why"),
    [
        (False, "nobody listens at its address any more"),  # its host says so
        (True, "it has taken no new one for 2 s"),  # what is in between still takes connections
    ],
)
def test_a_peer_that_died_is_named_long_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, through_a_wire: bool, why: str
) -> None:
    monkeypatch.setattr(zeromq_monitor, "GRACE_S", 2.0 if through_a_wire else ENDLESS_S)
    script = (
        "import sys, commlib\n"
        "from commlib.transports.zeromq import ZeroMQ\n"
        "end = ZeroMQ(1)\n"
        "end.connect(0, sys.argv[1])\n"
        "print(end.address, flush=True)\n"
        "end.recv(0)\n"
        "end.send(0, clock=1)\n"
        "end.recv(0)\n"
    )
    with contextlib.ExitStack() as stack, ZeroMQ(0, timeout=ENDLESS_S) as a:
        with subprocess.Popen([sys.executable, "-c", script, a.address], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            address = other.stdout.readline().strip()
            if through_a_wire:
                address = stack.enter_context(contextlib.closing(Wire(address))).address
            a.connect(1, address)
            a.send(1)
            assert a.recv(1).clock == 1
            other.kill()
        with pytest.raises(PeerLost, match=f"rank 1 is gone: its connection ended, and {why}"):
            a.recv(1)
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            a.send(1)


def test_who_asks_who_is_gone_takes_nothing_that_has_come() -> None:
    with two() as (a, b):
        assert a.gone(0.05) == {}
        b.send(0, clock=1)
        b.close()
        until(lambda: bool(a.gone(0.05)))
        assert a.gone(0.05) == {1: "rank 1 has said goodbye"}
        assert a.recv(1, timeout=60).clock == 1
        a.close()
        with pytest.raises(CommlibError, match="is closed"):
            a.gone(0.05)


def test_what_a_peer_sent_before_it_ended_arrives_however_long_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("_EVERY_S", "_KNOCKS_S"):  # it looks often
        monkeypatch.setattr(zeromq_monitor, pause, 0.05)
    script = (
        "import sys\n"
        "from commlib.messaging import endpoint\n"
        "from commlib.transports.zeromq import ZeroMQ\n"
        "endpoint._FAREWELL_S = 0.0\n"
        "with ZeroMQ(1) as end:\n"
        "    end.connect(0, sys.argv[1])\n"
        "    print(end.address, flush=True)\n"
        "    end.recv(0)\n"
        "    end.send(0, clock=1, parts=(bytes(1 << 20),))\n"
    )
    with ZeroMQ(0, timeout=ENDLESS_S) as a, contextlib.closing(Wire(a.address, piece_s=0.06)) as slow:
        with subprocess.Popen([sys.executable, "-c", script, slow.address], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            a.connect(1, other.stdout.readline().strip())
            a.send(1)
            other.wait()
        assert a.recv(1).clock == 1
        with pytest.raises(PeerLost, match="rank 1 has said goodbye"):
            a.recv(1)
