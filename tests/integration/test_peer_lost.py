"""A rank that dies or stops in the middle of training: the others say which one, soon, and end."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import commlib
from tests.support import forked_ranks

pytestmark = pytest.mark.full

SIZE = 3
VICTIM = 2
STEPS_BEFORE = 3


@dataclasses.dataclass(frozen=True)
class Scene:
    """What is trained, and what becomes of rank 2 after three steps.

    Args:
        rule: what is attached.
        stop: it stops without dying; otherwise it is killed.
        seconds: time-out of the model's process group.
        deadline: within which the others must have raised.
        limit: of rate; at this one a step naps for about a second.
        servers: that add up gradients.
    """

    rule: str
    stop: bool = False
    seconds: float = 600
    deadline: float = 60
    limit: commlib.RateLimit | None = None
    servers: str | None = None


SLOW = commlib.RateLimit(0.2, burst=4096)
SCENES = {
    "killed, onebit@scatter_gather": Scene("onebit@scatter_gather"),
    "killed, powersgd": Scene("powersgd:rank=2"),
    "killed, none": Scene("none"),
    "killed, factors": Scene("factors"),
    "killed, owners": Scene("owners"),
    "killed, push_pull": Scene("push_pull", servers="embedded"),
    "killed, none, limited": Scene("none", limit=SLOW),
    "killed, powersgd, limited": Scene("powersgd:rank=2", limit=SLOW),
    "killed, factors, limited": Scene("factors", limit=SLOW),
    "stopped, onebit@scatter_gather": Scene("onebit@scatter_gather", stop=True, seconds=15),
    "stopped, none": Scene("none", stop=True, seconds=15),
}


@dataclasses.dataclass
class Ending:
    """How it ended for a survivor: the error of the step, of the next one, and the process's exit code."""

    kind: str = ""
    family: tuple[str, ...] = ()
    text: str = ""
    seconds: float = 0.0
    again: str = ""
    exitcode: int | None = None


def rank_main(name: str, rank: int, port: int, pipe: Connection) -> None:
    """One rank process. The victim ends itself in the middle of a backward pass, between two buckets."""
    scene = SCENES[name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    server = c10d.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=120))
    store = c10d.PrefixStore(name, server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    dist.barrier()  # a rank may begin late; from here on they are together
    group = dist.new_group(timeout=datetime.timedelta(seconds=scene.seconds)) if scene.stop else None
    first = nn.Linear(32, 40)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.004, process_group=group)
    comm = commlib.attach(ddp, scene.rule, min_size=0, timeout=300, limit=scene.limit, servers=scene.servers)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
    for _ in range(STEPS_BEFORE):
        ddp(x).square().mean().backward()
    pipe.send(comm.stats().steps)
    if rank == VICTIM:

        def end(grad: Tensor) -> None:  # by now the buckets of the later layers are under way
            os.kill(os.getpid(), signal.SIGSTOP if scene.stop else signal.SIGKILL)

        first.weight.register_hook(end)
    start = time.monotonic()
    ending = Ending()
    try:
        for _ in range(3):  # the victim's last buckets may still get through
            ddp(x).square().mean().backward()
    except Exception as e:
        family = tuple(k.__name__ for k in type(e).__mro__)
        ending = Ending(type(e).__name__, family, str(e), time.monotonic() - start)
    try:
        ddp(x).square().mean().backward()
    except Exception as e:
        ending.again = f"{type(e).__name__}: {e}"
    comm.close()
    pipe.send(ending)


@contextlib.contextmanager
def cast(port: int, name: str) -> Iterator[list[tuple[Any, Connection]]]:
    """The scene's ranks, and what they tell; none of them outlives this."""
    context = forked_ranks.context()
    ranks: list[tuple[Any, Connection]] = []
    try:
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(name, rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        yield ranks
    finally:
        for process, pipe in ranks:
            process.kill()  # a stopped process too
            process.join()
            process.close()
            pipe.close()


def play(name: str) -> list[Ending]:
    """How it ended for ranks 0 and 1."""
    server = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = [Ending() for _ in range(VICTIM)]
    with cast(server.port, name) as ranks:
        for rank, (_, pipe) in enumerate(ranks):
            assert pipe.poll(120), f"rank {rank} did not train"
            assert pipe.recv() == STEPS_BEFORE
        end = time.monotonic() + 120
        for rank, (process, pipe) in enumerate(ranks[:VICTIM]):
            with contextlib.suppress(EOFError):
                if pipe.poll(max(0.0, end - time.monotonic())):
                    found[rank] = pipe.recv()
            process.join(max(0.1, min(30.0, end - time.monotonic())))
            found[rank].exitcode = process.exitcode
    return found


@pytest.mark.parametrize("name", SCENES)
def test_the_others_name_in_time_who_is_missing_and_again_and_end(name: str) -> None:
    for rank, ending in enumerate(play(name)):
        assert ending.text, f"rank {rank} raised nothing"
        assert "rank 2 did not answer" in ending.text, ending.text
        assert f"rank {rank} of 3 could not exchange bucket" in ending.text, ending.text
        assert ending.seconds < SCENES[name].deadline
        assert ending.kind == "PeerLost", f"{ending.kind}: {ending.text}"
        assert "CommlibError" in ending.family
        assert ending.again
        assert ending.exitcode == 0
