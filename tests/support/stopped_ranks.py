"""Stopped ranks: what the others say, and after how long, when one stands still in the middle of a training.

    python -m tests.support.stopped_ranks SECONDS [--cut] [BACKEND] [ROUTE …]

prints a table, for every route over Gloo and over zmq: rank 0 is stopped, which keeps the store in which ranks meet, or
rank 2, which does not; SECONDS is the deadline of the process group. A rank is forked from this process, which has
imported PyTorch. With ``--cut`` each rank has an emulated host, and the cable of one is pulled: all ranks live, and all
must raise.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.bench.lab import Lab
from commlib.errors import CommlibError
from commlib.planning.manager import manager
from tests.support.forked_ranks import entering
from tests.support.tiny_ddp import Head

RANKS = 3
STEPS = 4
"""Steps before the rank stops; those of the others go on until they raise."""

WIDTHS = [200, 310, 190]
"""Of the model's layers."""

Step = Callable[[], None]


def _model() -> nn.Module:
    a, b, c = WIDTHS
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, 10))


def _backward(model: Callable[..., Any]) -> None:
    model(torch.randn(8, WIDTHS[0])).square().mean().backward()


def attached(rule: str | None) -> Step:
    """A DDP model of several buckets."""
    vars(manager)["Controller"] = lambda model: Head(model, 2)  # rows, whatever would be chosen here
    ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.1)
    state = None if rule is None else commlib.attach(ddp, rule, min_size=0)

    def step() -> None:
        _backward(ddp)
        assert state is None or state.stats().steps >= 0

    return step


def local() -> Step:
    """A model that meets others after every second step."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = commlib.LocalSteps(model, "diloco", "int8", tau=2, optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad()
        _backward(model)
        optimizer.step()
        made.step()

    return step


def sharded() -> Step:
    """A model of FSDP2."""
    model = _model()
    fully_shard(model)
    state = commlib.attach(model, "int8")

    def step() -> None:
        _backward(model)
        assert state.stats().steps >= 0

    return step


def zero() -> Step:
    """A sharded optimizer."""
    model = _model()
    made = commlib.ShardedStep(model, torch.optim.SGD(model.parameters(), lr=0.01), "int8")

    def step() -> None:
        _backward(model)
        made.step()

    return step


def server() -> Step:
    """A model whose values parameter servers keep, beside the ranks."""
    model = _model()
    made = commlib.ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.01), "ssp:1", "embedded")

    def step() -> None:
        _backward(model)
        made.step()

    return step


ROUTES: dict[str, Callable[[], Step]] = {
    "ddp": lambda: attached(None),
    **{
        rule: lambda rule=rule: attached(rule)  # type: ignore[misc]
        for rule in ("none", "fp16", "onebit", "powersgd:rank=2", "factors", "owners", "auto")
    },
    "local": local,
    "fsdp": sharded,
    "zero": zero,
}
"""Route → what makes a rank's model, and its step."""


def told(
    route: str, backend: str, lost: int, deadline_s: float, patience_s: float, *, cut: bool = False
) -> dict[int, dict[str, Any]]:
    """What each rank that lives raised: ``error`` (its type), ``text``, ``seconds`` since its last step had ended.

    Args:
        route, backend: of the training.
        lost: the rank that stands still after some steps, or is cut off.
        deadline_s: of the process group.
        patience_s: so long may the ranks take; who has said nothing then is not in the result.
        cut: the rank is cut off.
    """
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(RANKS)) if cut else None
        pids, pipes = [], {}
        for rank, (first, env) in enumerate(_here() if lab is None else _on_hosts(lab)):
            ours, theirs = os.pipe()
            if (pid := os.fork()) == 0:
                with contextlib.suppress(BaseException):
                    first()
                    os.environ.update(env)
                    _train(route, backend, rank == lost, cut, deadline_s, theirs)
                os._exit(1)
            os.close(theirs)
            pids.append(pid)
            pipes[rank] = ours
        alive = [rank for rank in pipes if cut or rank != lost]
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + patience_s
        while len(found) < len(alive) and (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([pipes[r] for r in alive if r not in found], [], [], left)
            for rank in alive:
                if pipes[rank] in ready:
                    said = json.loads(os.read(pipes[rank], 1 << 16) or b"{}")
                    if said == _NOW and lab is not None:
                        lab.cut(lost)
                    else:
                        found[rank] = said
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in pipes.values():
            os.close(pipe)
        return found


_NOW = {"cut": "now"}
_Place = tuple[Callable[[], None], Mapping[str, str]]


def _here() -> list[_Place]:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = str(s.getsockname()[1])
    env = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [(lambda: None, {**env, "RANK": str(rank)}) for rank in range(RANKS)]


def _on_hosts(lab: Lab) -> list[_Place]:
    port, found = lab.start(), list[_Place]()
    for rank in range(RANKS):
        first = entering(lab.prefix(rank))
        if first is None:
            raise CommlibError("ranks go to their emulated hosts as root only")
        found.append((first, {**lab.environment(rank, port), "COMMLIB_INSECURE": "1"}))
    return found


def _train(route: str, backend: str, lost: bool, cut: bool, deadline_s: float, pipe: int) -> None:
    torch.set_num_threads(1)
    ended = time.monotonic()
    try:
        patient = datetime.timedelta(seconds=60)  # on a busy machine to meet takes longer
        store, rank, size = next(rendezvous("env://", timeout=patient))
        deadline = datetime.timedelta(seconds=deadline_s)
        store.set_timeout(deadline)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=deadline)
        step = ROUTES[route]()
        for done in range(1 << 30):
            if lost and done == STEPS:
                if cut:
                    os.write(pipe, json.dumps(_NOW).encode())
                else:
                    os.kill(os.getpid(), signal.SIGSTOP)
            step()
            ended = time.monotonic()
    except BaseException as e:
        said = {"error": type(e).__name__, "text": str(e), "seconds": time.monotonic() - ended}
        os.write(pipe, json.dumps(said).encode())


def main(deadline_s: float, backends: Sequence[str], routes: Sequence[str], *, cut: bool = False) -> None:
    """Print the table; exits with 1 if a rank was still there a minute after its deadline."""
    hangs = False
    for backend in backends:
        for route in routes:
            cells = []
            for lost in (0, RANKS - 1):
                found = told(route, backend, lost, deadline_s, deadline_s + 60.0, cut=cut)
                alive = [rank for rank in range(RANKS) if cut or rank != lost]
                seconds = [found[r].get("seconds", 0.0) if r in found else None for r in alive]
                errors = {f"{said.get('error')}" for said in found.values()}
                hangs |= None in seconds
                cells.append(f"{', '.join('hangs' if s is None else f'{s:.1f}' for s in seconds)} {'/'.join(errors)}")
            print(f"| {backend} | {route} | {' | '.join(cells)} |", flush=True)
    sys.exit(hangs)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--cut"]
    main(float(words[0]), words[1:2] or ("gloo", "zmq"), words[2:] or list(ROUTES), cut=len(words) < len(sys.argv) - 1)
