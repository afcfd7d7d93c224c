"""The raw line: between two real ranks, through the lab, and when an end is missing."""

from __future__ import annotations

import socket
import threading

import pytest

from commlib.bench.lab import Lab
from commlib.bench.launch import run_ranks
from commlib.bench.link import stream
from commlib.bench.link.stream import Line, choose_peer, measure_line, typical_rate
from commlib.exchange.item import World
from fleet import Fleet, RankFailed


def measure_twice(world: World) -> list[Line | None]:
    return [measure_line(0.05), measure_line(0.05)]


def peer_cannot_listen(world: World) -> None:
    if world.rank == 1:
        stream.own_address = lambda: "203.0.113.1"  # RFC 5737: nobody's
    try:
        measure_line(0.05)
    finally:
        stream.own_address = REAL_ADDRESS


REAL_ADDRESS = stream.own_address


def in_lab(seconds: float) -> list[Line | None]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [measure_line(seconds) for _ in range(3)]


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection over the loopback, with deadlines."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), 10)
        theirs, _ = listener.accept()
    theirs.settimeout(10)
    return ours, theirs


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.slow
def test_every_rank_has_the_same_line(fleet: Fleet, ranks: int) -> None:
    first, *others = fleet.run(ranks, measure_twice)
    assert others == [first] * (ranks - 1)
    for line in first:
        assert line.gbit_s > 0.05
        assert 0 < line.latency_s < 0.1


def test_one_rank_has_no_line(fleet: Fleet) -> None:
    assert fleet.run(1, measure_twice) == [[None, None]]


def test_a_peer_that_cannot_listen_is_named_on_every_rank(fleet: Fleet) -> None:
    with pytest.raises(RankFailed) as e:
        fleet.run(3, peer_cannot_listen)
    assert str(e.value).count("PeerLost: rank 1 cannot listen on 203.0.113.1") == 3


def test_the_peer_is_on_another_host_where_there_is_one() -> None:
    assert choose_peer(["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]) == 2
    assert choose_peer(["127.0.0.1"] * 3) == 1


def test_an_end_that_goes_away_is_no_endless_wait() -> None:
    ours, theirs = connected()
    with ours:
        theirs.close()
        with pytest.raises(OSError, match=r"closed the connection|Broken pipe|reset by peer"):
            stream.ping(ours)


def test_the_rate_is_what_arrives() -> None:
    ours, theirs = connected()
    with ours, theirs:
        sender = threading.Thread(target=stream.send_stream, args=(ours, 0.1))
        sender.start()
        rate = stream.receive_stream(theirs)
        sender.join(10)
        assert not sender.is_alive()
    assert rate > 0.05


def test_a_pause_does_not_change_the_typical_rate() -> None:
    steady = [(0.02 * i, 1000 * i) for i in range(10)]
    paused = [*steady[:5], *((t + 0.5, n) for t, n in steady[5:])]
    assert typical_rate(steady) == pytest.approx(50_000)
    assert typical_rate(paused) == pytest.approx(50_000)
    assert typical_rate([(1.0, 5)]) == typical_rate([]) == 0.0


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_stream_lasts_some_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds"):
        measure_line(seconds)


@pytest.mark.alone
@pytest.mark.slow
def test_the_line_of_a_lab_is_its_rate(lab: object) -> None:
    made: Lab = lab(2, 200e6, ranks_per_host=2)  # type: ignore[operator]
    port = made.start()
    payload = 0.2 * 1448 / 1514  # of every full frame
    best = 0.0
    for _ in range(8):  # a busy machine makes a line slower, never faster
        lines = run_ranks(in_lab, 4, (0.3,), env=lambda r: made.environment(r, port), prefix=made.prefix)[0]
        best = max(best, *(line.gbit_s for line in lines))
        if best > 0.9 * payload:
            break
    assert 0.9 * payload < best < 1.02 * payload
