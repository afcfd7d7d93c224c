"""Bytes at the sockets: what TCP carried, to the byte, and nothing else."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch
import torch.distributed as dist

from commlib.bench.results import socket_counters
from commlib.bench.results.socket_counters import SocketCounters, traffic
from commlib.groups.world import World
from tests.support.rank_pool import Fleet

pytestmark = pytest.mark.skipif(traffic() is None, reason="this system does not count bytes per connection")


def now() -> SocketCounters:
    counted = traffic()
    assert counted is not None
    return counted


@pytest.mark.parametrize("size", [1, 100_000, 3_000_001])
def test_every_byte_of_a_stream_is_counted_once(size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        into, _ = server.accept()
        with into:
            before = now()
            sender = threading.Thread(target=out.sendall, args=(b"x" * size,))
            sender.start()
            got = 0
            while got < size:
                got += len(into.recv(1 << 16))
            sender.join()
            moved = now() - before
    assert (moved.sent, moved.received) == (size, size)


def test_files_pipes_listeners_and_unix_sockets_are_passed_over() -> None:
    before = now()
    r, w = os.pipe()
    left, right = socket.socketpair()
    with left, right, socket.create_server(("127.0.0.1", 0)):
        left.sendall(b"not TCP")
        os.write(w, b"nor this")
        assert now() - before == SocketCounters(0, 0, 0)
    os.close(r)
    os.close(w)


def test_looking_leaves_no_descriptor_open() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            now()
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_system_that_does_not_count_is_told_from_one_that_counted_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        monkeypatch.setattr(socket_counters, "_tcp_info", lambda fd: b"\0" * 104)  # what Linux 3 gives
        assert traffic() is None


def count_an_all_reduce(world: World, numel: int) -> tuple[int, int]:
    """(bytes at this rank's sockets, bytes a ring sends)."""
    x = torch.ones(numel)
    dist.all_reduce(x)
    dist.barrier()
    before = now()
    dist.all_reduce(x)
    after = now()
    dist.barrier()
    return (after - before).sent, round(2 * (world.size - 1) / world.size * x.nbytes)


def test_a_gloo_all_reduce_sends_the_bytes_of_a_ring(fleet: Fleet) -> None:
    for sent, expected in fleet.run(3, count_an_all_reduce, 300_000):
        assert expected <= sent < 1.01 * expected + 2000  # its messages have headers; a peer may be a chunk ahead
