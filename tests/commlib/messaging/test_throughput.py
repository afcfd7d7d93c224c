"""The raw line: between two ends of a connection, between ranks that a store knows, and when an end is missing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading

import pytest
from torch._C import _distributed_c10d as c10d

from commlib.errors import PeerLost
from commlib.groups.world import World
from commlib.messaging import throughput
from commlib.messaging.throughput import Stream, choose_peer, measure, ping, receive_stream, send_stream, typical_rate


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection over the loopback, with deadlines."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), 120)
        theirs, _ = listener.accept()
    theirs.settimeout(120)
    return ours, theirs


def test_the_peer_is_on_another_host_where_there_is_one() -> None:
    assert choose_peer(["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]) == 2
    assert choose_peer(["127.0.0.1"] * 3) == 1


def test_an_end_that_goes_away_is_no_endless_wait() -> None:
    ours, theirs = connected()
    with ours:
        theirs.close()
        with pytest.raises(OSError, match=r"closed the connection|Broken pipe|reset by peer"):
            ping(ours)


class Ticks:
    """A clock on which so many seconds pass from look to look, however fast the machine is."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._looks = seconds, 0

    def __call__(self) -> float:
        self._looks += 1
        return self._looks * self._seconds


class Ends:
    """A clock on which the time of a stream is over at the second look."""

    def __init__(self, over: threading.Event) -> None:
        self._over, self._looks = over, 0

    def __call__(self) -> float:
        self._looks += 1
        if self._looks > 1:
            self._over.set()
        return 1000.0 * self._looks


SENDS, READS = 0.001, 0.05
"""Of a rank that sends, and of one that reads: a megabyte at most at a time."""
MOST = 8e-9 * (1 << 20) / READS  # Gbit/s


def test_the_rate_is_what_arrives() -> None:
    ours, theirs = connected()
    with ours, theirs, concurrent.futures.ThreadPoolExecutor(1) as pool:
        sender = pool.submit(send_stream, ours, 0.1, Ticks(SENDS))
        rate = receive_stream(theirs, 120, Ticks(READS))
        assert sender.result(120) == rate
    assert 0 < rate <= MOST


def test_a_rank_that_had_no_core_while_the_stream_lasted_is_sent_more_until_it_can_tell_the_rate() -> None:
    ours, theirs = connected()
    with ours, theirs, concurrent.futures.ThreadPoolExecutor(1) as pool:
        over = threading.Event()
        sender = pool.submit(send_stream, ours, 0.1, Ends(over))
        assert over.wait(120)  # by its clock all is sent, and not a byte has been read
        rate = receive_stream(theirs, 120, Ticks(READS))
        assert sender.result(120) == rate
    assert 0 < rate <= MOST


def test_who_takes_everything_and_says_nothing_holds_nobody_up() -> None:
    ours, theirs = connected()
    with ours, theirs:
        reader = threading.Thread(target=read_for_ever, args=(theirs,), daemon=True)
        reader.start()
        with pytest.raises(TimeoutError, match="told no rate"):
            send_stream(ours, 0.01, within=0.1)
        ours.shutdown(socket.SHUT_RDWR)
        reader.join(120)
        assert not reader.is_alive()


def test_who_never_ends_a_stream_holds_nobody_up() -> None:
    ours, theirs = connected()
    with ours, theirs:
        sender = threading.Thread(target=send_for_ever, args=(ours,), daemon=True)
        sender.start()
        with pytest.raises(TimeoutError, match="goes on for too long"):
            receive_stream(theirs, 0.1)
    sender.join(120)
    assert not sender.is_alive()


def test_a_pause_does_not_change_the_typical_rate() -> None:
    steady = [(0.02 * i, 1000 * i) for i in range(10)]
    paused = [*steady[:5], *((t + 0.5, n) for t, n in steady[5:])]
    assert typical_rate(steady) == pytest.approx(50_000)
    assert typical_rate(paused) == pytest.approx(50_000)
    assert typical_rate([(1.0, 5)]) == typical_rate([]) == 0.0


def all_ranks(addresses: list[str]) -> list[Stream | str | None]:
    """What each rank finds, or why it does not."""
    store = c10d.HashStore()

    def one(rank: int) -> Stream | str | None:
        try:
            return measure(
                store, "line", World(rank, len(addresses)), addresses[rank], 0.05, Ticks(READS if rank else SENDS)
            )
        except PeerLost as e:
            return str(e)

    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(one, range(len(addresses))))


def read_for_ever(s: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while s.recv(1 << 20):
            pass


def send_for_ever(s: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            s.sendall(b"x" * 1000)


@pytest.mark.parametrize("addresses", [["127.0.0.1"] * 2, ["127.0.0.1", "127.0.0.1", "127.0.0.2"]])
def test_all_ranks_of_a_store_have_the_same_line(addresses: list[str]) -> None:
    first, *others = all_ranks(addresses)
    assert isinstance(first, Stream)
    assert 0 < first.gbit_s <= MOST
    assert first.latency_s == pytest.approx(SENDS / 2)
    assert others == [first] * len(others)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_addresses_may_be_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("the loopback has no IPv6 address")
    assert isinstance(all_ranks(["::1", "::1"])[0], Stream)


def test_a_rank_that_does_not_come_is_named_by_those_who_wait_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "_STORE_S", 0.3)
    store = c10d.HashStore()
    store.set("line/address/0", "127.0.0.1")
    with pytest.raises(PeerLost, match=r"^rank 2 said nothing for 0\.3 s while the line was measured$"):
        measure(store, "line", World(1, 3), "127.0.0.1")


def test_one_rank_has_none() -> None:
    assert all_ranks(["127.0.0.1"]) == [None]


def test_an_address_that_is_not_the_peers_is_named_on_every_rank() -> None:
    found = all_ranks(["127.0.0.1", "203.0.113.1", "127.0.0.1"])  # RFC 5737: nobody's
    assert all("rank 1 cannot listen on 203.0.113.1" in str(f) for f in found)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_stream_lasts_some_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds"):
        measure(c10d.HashStore(), "line", World(0, 2), "127.0.0.1", seconds)
