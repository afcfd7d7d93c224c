"""The raw line between the ranks of a process group, here and through the lab."""

from __future__ import annotations

import pytest

from commlib.bench.lab import Lab
from commlib.bench.launch.processes import run_ranks
from commlib.bench.link import worker
from commlib.bench.link.worker import measure_line
from commlib.groups.world import World
from commlib.messaging.throughput import Stream
from tests.support.rank_pool import Fleet, RankFailed


def measure_twice(world: World) -> list[Stream | None]:
    return [measure_line(0.5), measure_line(0.5)]  # less, and a busy machine may see nothing of it


def peer_cannot_listen(world: World) -> None:
    if world.rank == 1:
        worker.own_address = lambda: "203.0.113.1"  # RFC 5737: nobody's
    try:
        measure_line(0.05)
    finally:
        worker.own_address = REAL_ADDRESS


REAL_ADDRESS = worker.own_address


def in_lab(seconds: float) -> list[Stream | None]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    lines = [measure_line(seconds) for _ in range(3)]
    dist.barrier()  # rank 0 keeps the store, and others may have to read yet what the last line was
    return lines


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_has_the_same_line(fleet: Fleet, ranks: int) -> None:
    first, *others = fleet.run(ranks, measure_twice)
    assert others == [first] * (ranks - 1)
    for line in first:
        assert line.gbit_s > 0
        assert line.latency_s > 0


def test_one_rank_has_no_line(fleet: Fleet) -> None:
    assert fleet.run(1, measure_twice) == [[None, None]]


def test_a_peer_that_cannot_listen_is_named_on_every_rank(fleet: Fleet) -> None:
    with pytest.raises(RankFailed) as e:
        fleet.run(3, peer_cannot_listen)
    assert str(e.value).count("PeerLost: rank 1 cannot listen on 203.0.113.1") == 3


@pytest.mark.alone
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
