"""Delays and cuts of the wires: each collective gives the right result or a named error in time, and never hangs.

``COMMLIB_REPEAT=200`` for longer: so many groups for each collective.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commlib.errors import PeerLost, ProtocolError
from commlib.transports.process_group.group import ZmqGroup
from tests.support.thread_groups import WiredStore, each, groups, set_deadline

REPEAT = int(os.environ.get("COMMLIB_REPEAT", "3"))
SIZE, CALLS, SECONDS = 3, 12, 1.0
HANGS_S, ENDLESS_S = 200.0, 600.0  # all calls, a roll call and goodbye take 22 s at most; who waits for the other hangs

Collective = Callable[[ZmqGroup, int, int], None]


def filled(n: int, value: int) -> Tensor:
    return torch.full((n,), float(value))


def check(tensor: Tensor, value: int) -> None:
    if not tensor.eq(value).all():
        raise AssertionError(f"expected {value} everywhere, got {tensor}")


def all_reduce(group: ZmqGroup, rank: int, n: int) -> None:
    group.allreduce([x := filled(n, rank + 1)]).wait()
    check(x, 6)


def broadcast(group: ZmqGroup, rank: int, n: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 1
    group.broadcast([x := filled(n, rank)], options).wait()
    check(x, 1)


def reduce(group: ZmqGroup, rank: int, n: int) -> None:
    options = dist.ReduceOptions()
    options.rootRank = 2
    group.reduce([x := filled(n, rank + 1)], options).wait()
    check(x, 6 if rank == 2 else rank + 1)


def all_gather(group: ZmqGroup, rank: int, n: int) -> None:
    outs = [filled(n, 9) for _ in range(SIZE)]
    group.allgather([outs], [filled(n, rank)]).wait()
    for p, out in enumerate(outs):
        check(out, p)


def gather(group: ZmqGroup, rank: int, n: int) -> None:
    options = dist.GatherOptions()
    options.rootRank = 0
    outs = [filled(n, 9) for _ in range(SIZE)] if rank == 0 else []
    group.gather([outs] if outs else [], [filled(n, rank)], options).wait()
    for p, out in enumerate(outs):
        check(out, p)


def scatter(group: ZmqGroup, rank: int, n: int) -> None:
    options = dist.ScatterOptions()
    options.rootRank = 0
    group.scatter([x := filled(n, 9)], [[filled(n, p) for p in range(SIZE)]] if rank == 0 else [], options).wait()
    check(x, rank)


def reduce_scatter(group: ZmqGroup, rank: int, n: int) -> None:
    group.reduce_scatter([x := filled(n, 9)], [[filled(n, p + rank) for p in range(SIZE)]]).wait()
    check(x, 3 * rank + 3)


def all_to_all(group: ZmqGroup, rank: int, n: int) -> None:
    outs = [filled(n, 9) for _ in range(SIZE)]
    group.alltoall(outs, [filled(n, 10 * rank + p) for p in range(SIZE)]).wait()
    for p, out in enumerate(outs):
        check(out, 10 * p + rank)


def barrier(group: ZmqGroup, rank: int, n: int) -> None:
    group.barrier().wait()


def send_and_recv(group: ZmqGroup, rank: int, n: int) -> None:
    sent = group.send([filled(n, rank)], (rank + 1) % SIZE, 0)
    group.recv([x := filled(n, 9)], (rank - 1) % SIZE, 0).wait()
    sent.wait()
    check(x, (rank - 1) % SIZE)


COLLECTIVES: list[Collective] = [
    all_reduce, broadcast, reduce, all_gather, gather, scatter, reduce_scatter, all_to_all, barrier, send_and_recv,
]  # fmt: skip


def through_cuts(collective: Collective, seed: int) -> list[str]:
    """What each rank ended with, after some calls while wires were cut: "right", or an error's name."""
    draw = random.Random(seed)
    ended = threading.Event()

    def cut(wires: WiredStore) -> None:
        while not ended.wait(draw.uniform(0.005, 0.08)):
            if wires.wires:
                draw.choice(wires.wires).cut()

    def run(group: ZmqGroup) -> str:
        own = random.Random(1000 * seed + group.rank())
        alike = random.Random(seed)
        try:
            for _ in range(CALLS):
                n = alike.choice([1, 100, 50_000, 400_000])
                time.sleep(own.choice([0, 0, own.uniform(0, 0.01)]))
                collective(group, group.rank(), n)
        except (PeerLost, ProtocolError) as e:
            return type(e).__name__ if "rank " in str(e) else f"nobody is named: {e}"
        return "right"

    with contextlib.closing(WiredStore()) as wires, groups(SIZE, seconds=ENDLESS_S, store=wires) as ranks:
        set_deadline(ranks, SECONDS)
        cutter = threading.Thread(target=cut, args=(wires,))
        cutter.start()
        try:
            return each(ranks, run)
        finally:
            ended.set()
            cutter.join()


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda c: c.__name__)
def test_the_right_result_or_a_named_error_in_time(collective: Collective) -> None:
    for seed in range(REPEAT):
        began = time.monotonic()
        ends = through_cuts(collective, seed)
        took = time.monotonic() - began
        assert set(ends) <= {"right", "PeerLost", "ProtocolError"}
        assert took < HANGS_S, f"seed {seed}: {ends} after {took:.1f} s"


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda c: c.__name__)
def test_delays_alone_change_nothing(collective: Collective) -> None:
    with groups(SIZE) as ranks:

        def run(group: ZmqGroup) -> None:
            own, alike = random.Random(group.rank()), random.Random(5)
            for _ in range(40):
                time.sleep(own.choice([0, 0, own.uniform(0, 0.005)]))
                collective(group, group.rank(), alike.choice([1, 100, 50_000]))

        each(ranks, run)
