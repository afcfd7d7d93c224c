"""The raw line of all ranks at once: between real ranks, and when one is missing."""

from __future__ import annotations

import datetime
import itertools
import os
import signal

import pytest
import torch.distributed as dist

from commlib.bench.server import ring_throughput
from commlib.bench.server.ring_throughput import RingBenchmark, Ticks, measure_ring, ticks
from commlib.errors import PeerLost
from commlib.groups.store import store_of
from commlib.groups.world import World
from tests.support.rank_pool import Fleet, RankFailed
from tests.support.tiers import full

PATIENCE_S = 3.0
"""It lapses for the rank that is stopped; the others are there."""


def measure_twice(world: World) -> list[RingBenchmark | None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_throughput, "_TAIL_S", 2.0)  # a rank may be late
        return [measure_ring(0.05), measure_ring(0.1)]


def one_cannot_listen(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(ring_throughput, "own_address", lambda: "203.0.113.1")  # RFC 5737: nobody's
        measure_ring(0.05)


def one_does_not_come(world: World) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_throughput, "_LATE_S", 3.0)
        if world.rank == 2:
            return "elsewhere"
        with pytest.raises(PeerLost) as e:
            measure_ring(0.05)
    return str(e.value)


def one_leaves(world: World) -> str:
    """Rank 1 goes, without a word, when it is about to count what comes."""
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(ring_throughput, "ticks", leave)
        try:
            measure_ring(0.2, patience=PATIENCE_S)
        except (PeerLost, KeyError) as e:
            return f"{type(e).__name__}: {e}"
    return "no error"


def leave() -> Ticks | None:
    raise KeyError("gone")


def one_is_stopped(world: World) -> tuple[str, int | None]:
    """Rank 1 is stopped at the same moment; rank 0 wakes it when it has its own answer, and so has rank 2."""
    store = store_of(dist.group.WORLD)
    error: PeerLost | None = None
    looks = itertools.count()

    def stop() -> Ticks | None:
        if next(looks) == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        return ticks()

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            store.set("pid", str(os.getpid()))
            patch.setattr(ring_throughput, "ticks", stop)
        try:
            measure_ring(0.2, patience=PATIENCE_S)
        except PeerLost as e:
            error = e
    if world.rank == 2:
        store.set("answered", b"")
    if world.rank == 0:
        store.wait(["pid", "answered"], datetime.timedelta(minutes=2))
        os.kill(int(store.get("pid")), signal.SIGCONT)
    return str(error), error.rank if error else None


@pytest.mark.parametrize("ranks", [3, *full(2)])
def test_every_rank_has_the_same_figures(fleet: Fleet, ranks: int) -> None:
    first, *others = fleet.run(ranks, measure_twice)
    assert others == [first] * (ranks - 1)
    for found in first:
        assert found.gbit_s > 0
        assert found.cores is None or 0 < found.cores <= 1


def test_one_rank_has_no_ring(fleet: Fleet) -> None:
    assert fleet.run(1, measure_twice) == [[None, None]]


def test_a_rank_that_cannot_listen_is_named_on_every_rank(fleet: Fleet) -> None:
    with pytest.raises(RankFailed) as e:
        fleet.run(3, one_cannot_listen)
    assert str(e.value).count("at once: rank 1 cannot listen on 203.0.113.1") == 3


def test_a_rank_that_does_not_come_is_named_by_all_others(fleet: Fleet) -> None:
    words = "no stream of all 3 ranks at once: rank 2 did not say within 3 s how its listening went"
    assert fleet.run(3, one_does_not_come) == [words, words, "elsewhere"]


@pytest.mark.full
def test_a_rank_that_leaves_in_mid_stream_is_named_by_all_others(fleet: Fleet) -> None:
    first, gone, last = fleet.run(3, one_leaves)
    assert gone == "KeyError: 'gone'"
    for said in (first, last):
        assert said.startswith("PeerLost: no stream of all 3 ranks at once: rank 1 did not say within")


@pytest.mark.full
def test_a_rank_that_is_stopped_in_mid_stream_is_named_by_all_others_before_it_is_awake(fleet: Fleet) -> None:
    first, _, last = fleet.run(3, one_is_stopped)
    for said, rank in (first, last):
        assert rank == 1
        assert "rank 1 did not say within 6.95 s how its streaming went" in said
        assert "rank 2 could not receive from rank 1: timed out" in said


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_stream_lasts_some_time(seconds: float) -> None:
    with pytest.raises(ValueError, match="more than 0 seconds"):
        measure_ring(seconds)
