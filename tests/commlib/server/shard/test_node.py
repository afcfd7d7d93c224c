"""Shards and workers over endpoints: training is what one process would compute, and what is wrong is named."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from commlib.errors import PeerLost, ProtocolError
from commlib.messaging.endpoint import Endpoint
from commlib.messaging.keys import KeyPair
from commlib.server.job.chunks import Chunk, cut
from commlib.server.job.consistency import make
from commlib.server.membership.hash_ring import HashRing
from commlib.server.membership.view import View, first
from commlib.server.protocol.messages import Ack, Push
from commlib.server.protocol.wire import pack
from commlib.server.shard.chunk_state import ChunkState
from commlib.server.shard.node import ShardNode
from commlib.server.shard.shard import Shard
from commlib.server.worker.client import ClientNode
from commlib.server.worker.client_state import ClientState
from commlib.transports.inproc import InProc
from commlib.transports.zeromq import ZeroMQ

KEYS = [KeyPair.new() for _ in range(5)]
START = {"w": torch.linspace(-1, 1, 40), "b": torch.zeros(3)}
CHUNKS: dict[str, Chunk] = {c.key: c for c in cut(START, 64, small=0)}


def with_keys(rank: int) -> Endpoint:
    return ZeroMQ(rank, keys=KEYS[rank], allowed=[k.public for k in KEYS])


endpoints = pytest.mark.parametrize("endpoint", [InProc, ZeroMQ, with_keys], ids=["inproc", "zeromq", "with keys"])


@contextlib.contextmanager
def connected(count: int, endpoint: Callable[[int], Endpoint]) -> Iterator[list[Endpoint]]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(endpoint(rank)) for rank in range(count)]
        for a in made:
            for b in made:
                if a is not b:
                    a.connect(b.rank, b.address, key=getattr(b, "public_key", None))
        yield made


class Servers:
    """Workers 0 and 1, shards at ranks 2, 3 and 4."""

    def __init__(self, ends: list[Endpoint], spec: str, copies: int, timeout: float = 120.0) -> None:
        rule, self.ranks = make(spec), {f"s{i}": 2 + i for i in range(3)}
        self.view: View = first(HashRing(self.ranks), range(2), {k: c.nbytes for k, c in CHUNKS.items()}, copies)

        def cell(key: str) -> ChunkState:
            chunk = CHUNKS[key]
            sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
            return ChunkState(chunk.gather(START).clone(), sgd, range(2), rule.threshold())

        self.shards = [Shard(name, self.view, cell) for name in self.ranks]
        self.nodes = [ShardNode(ends[self.ranks[s.name]], s, self.ranks) for s in self.shards]
        self.clients = [ClientNode(ends[rank], ClientState(rank, self.view), self.ranks, timeout) for rank in range(2)]

    def __enter__(self) -> Servers:
        everyone: list[ShardNode | ClientNode] = [*self.nodes, *self.clients]
        for node in everyone:
            node.start()
        return self

    def __exit__(self, *error: object) -> None:
        everyone: list[ShardNode | ClientNode] = [*self.nodes, *self.clients]
        for node in everyone:
            node.stop()


def gradient(worker: int, step: int, values: Tensor) -> Tensor:
    """Of what was read, so that a wrong read shows."""
    return values * (0.1 * (worker + 1)) + torch.sin(torch.arange(len(values)) + step)


def train(client: ClientNode, worker: int, steps: int) -> None:
    for step in range(steps):
        for key in CHUNKS:
            client.pull(key)
        for key in CHUNKS:
            client.push(key, gradient(worker, step, client.values(key)[0]))
    client.flush()


@endpoints
@pytest.mark.parametrize("copies", [1, 2])
def test_in_bulk_two_workers_train_as_one_process_would_to_the_last_bit(
    endpoint: Callable[[int], Endpoint], copies: int
) -> None:
    with connected(5, endpoint) as ends, Servers(ends, "bsp", copies) as servers:
        threads = [threading.Thread(target=train, args=(c, rank, 8)) for rank, c in enumerate(servers.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    serial = {key: torch.nn.Parameter(c.gather(START).clone()) for key, c in CHUNKS.items()}
    optimizer = torch.optim.SGD(serial.values(), lr=0.1, momentum=0.9)
    for step in range(8):
        for parameter in serial.values():
            parameter.grad = (gradient(0, step, parameter.data) + gradient(1, step, parameter.data)) / 2
        optimizer.step()
    for shard in servers.shards:
        for key, cell in shard.cells.items():
            assert torch.equal(cell.values, serial[key].data)
    assert sum(len(shard.cells) for shard in servers.shards) == copies * len(CHUNKS)


def test_a_bounded_worker_runs_ahead_so_far_and_then_names_the_shard_and_who_is_behind() -> None:
    with connected(5, InProc) as ends, Servers(ends, "ssp:2", 1) as servers:
        train(servers.clients[0], 0, 3)
        servers.clients[0]._timeout = 0.5  # for what it cannot get only
        with pytest.raises(
            PeerLost, match=r"0\.5 s for values of w\[0:13\] from s\d, at its clock 3; .* worker 1 at 0"
        ):
            train(servers.clients[0], 0, 2)
        clocks = {cell.included[0] for shard in servers.shards for cell in shard.cells.values()}
    assert clocks == {3}


def test_a_push_of_another_model_is_named_on_both_sides_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with connected(5, InProc) as ends, Servers(ends, "asp", 1) as servers, caplog.at_level(logging.WARNING):
        key = next(iter(CHUNKS))
        servers.clients[0].push(key, torch.zeros(99))
        with pytest.raises(ProtocolError, match=r"s\d: worker 0 pushes torch.float32 of shape \(99,\) to values"):
            servers.clients[0].flush()
        train(servers.clients[1], 1, 3)
    assert "refused a message of rank 0" in caplog.text


def test_a_push_that_is_not_finite_is_refused_and_its_worker_named(caplog: pytest.LogCaptureFixture) -> None:
    with connected(5, InProc) as ends, Servers(ends, "asp", 1) as servers, caplog.at_level(logging.WARNING):
        key = next(iter(CHUNKS))
        servers.clients[0].push(key, torch.full((13,), torch.nan))
        servers.clients[0].flush()
        servers.clients[1].pull(key)
        assert torch.equal(servers.clients[1].values(key)[0], CHUNKS[key].gather(START))
    assert f"refused push 0 of worker 0 to {key}: it is not finite" in caplog.text


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((b"GET / HTTP/1.1",), "cannot be read"),
        (pack(Push(0, next(iter(CHUNKS)), 1, 0, torch.zeros(13))), "rank 0 speaks for worker 1"),
        (pack(Ack(0, "w", 0, 0)), "rank 0 is no shard, and sends a Ack"),
    ],
)
def test_nonsense_and_who_speaks_for_another_are_refused(parts: tuple[bytes, ...], said: str) -> None:
    with connected(5, InProc) as ends, Servers(ends, "asp", 1) as servers:
        ends[0].send(2, parts=parts)
        servers.clients[0].pull(next(iter(CHUNKS)))
        with pytest.raises(ProtocolError, match=said):
            servers.clients[0]._until(lambda: None, str)
        train(servers.clients[1], 1, 2)


def test_a_shard_that_does_not_answer_is_named_within_the_deadline() -> None:
    with connected(5, ZeroMQ) as ends, Servers(ends, "asp", 1) as servers:
        train(servers.clients[0], 0, 1)
        servers.clients[0]._timeout = 1.0
        for node, rank in zip(servers.nodes, servers.ranks.values(), strict=True):
            node.stop()
            ends[rank].close()
        with pytest.raises(PeerLost, match=r"worker 0 waited 1 s for values of w\[0:13\] from s\d, at its clock 1"):
            train(servers.clients[0], 0, 1)


def test_what_ends_a_job_is_raised_by_whoever_waits() -> None:
    with connected(5, InProc) as ends, Servers(ends, "ssp:0", 1) as servers:
        waiting = threading.Timer(0.2, lambda: servers.clients[0].fail(PeerLost("all shards are lost")))
        waiting.start()
        with pytest.raises(PeerLost, match="all shards are lost"):
            train(servers.clients[0], 0, 2)
        with pytest.raises(PeerLost, match="all shards are lost"):
            servers.clients[0].push(next(iter(CHUNKS)), torch.zeros(13))
