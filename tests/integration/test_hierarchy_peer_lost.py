"""A rank that dies: also those raise in time, and name it, who do not notice it by themselves.

Under a hierarchy rank 0 has no process group with rank 3 but the model's own; in a flat ring rank 1 is not next to it.
No survivor ends before all of them have raised, for that would be noticed.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.groups.world import World
from tests.support import forked_ranks
from tests.support.tiers import full
from tests.support.tiny_ddp import torchrun

SIZE = 4
VICTIM = 3  # ranks 0 and 1 are one node, 2 and 3 the other
SCENES = [("none", True), *full(("onebit@scatter_gather", True), ("none", None), ("onebit@scatter_gather", None))]
DEADLINE = 240.0  # seconds: only what hangs takes so long. The process group's own is ten minutes


def rank_main(rule: str, hierarchy: bool | None, rank: int, port: int, pipe: Connection) -> None:
    """One rank. The victim ends itself in the middle of a backward pass, between two buckets."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    server = c10d.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=DEADLINE))
    store = c10d.PrefixStore(rule, server)
    timeout = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    first = nn.Linear(32, 40)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004)
    with torchrun(World(rank, SIZE), 2):
        comm = commlib.attach(ddp, rule, min_size=0, timeout=DEADLINE, hierarchy=hierarchy)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        ddp(x).square().mean().backward()
    pipe.send(comm.stats().steps)
    if rank == VICTIM:

        def end(grad: Tensor) -> None:  # by now the buckets of the later layers are under way
            os.kill(os.getpid(), signal.SIGKILL)

        first.weight.register_hook(end)
    said = again = ""
    try:
        for _ in range(3):  # the victim's last buckets may still get through
            ddp(x).square().mean().backward()
    except commlib.PeerLost as e:
        said = str(e)
    try:
        ddp(x).square().mean().backward()
    except Exception as e:
        again = f"{type(e).__name__}: {e}"
    comm.close()
    pipe.send((said, again))
    pipe.poll(DEADLINE)  # nobody may learn from the end of another survivor that something is wrong


@pytest.mark.parametrize(("rule", "hierarchy"), SCENES)
def test_every_other_rank_names_it_in_time_fails_the_next_step_too_and_ends_by_itself(
    rule: str, hierarchy: bool | None
):
    server = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = forked_ranks.context()
    ranks: list[tuple[Any, Connection]] = []
    try:
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rule, hierarchy, rank, server.port, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        for rank, (_, pipe) in enumerate(ranks):
            assert pipe.poll(DEADLINE), f"rank {rank} did not train"
            assert pipe.recv() == 3
        left: dict[Any, int] = {ranks[rank][1]: rank for rank in range(SIZE) if rank != VICTIM}
        end = time.monotonic() + DEADLINE
        while left and (ready := wait(list(left), timeout=max(0.0, end - time.monotonic()))):
            for there in ready:
                rank = left.pop(there)
                said, again = ranks[rank][1].recv()
                assert f"rank {rank} of 4 could not exchange bucket" in said, said
                assert "rank 3 did not answer" in said, said
                assert again, "a further step did not fail"
        assert not left, f"rank {sorted(left.values())} still waits"
        for rank in range(VICTIM):
            ranks[rank][1].send("end")
        for rank, (process, _) in enumerate(ranks):
            process.join(DEADLINE)
            assert process.exitcode == (-signal.SIGKILL if rank == VICTIM else 0)
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join()
            process.close()
            pipe.close()
