"""Clean exits: how jobs end whose script just ends, with attached models alive.

    python -m tests.support.clean_exits [ROUTE …] RUNS

Runs a job of two ranks so many times, and prints how many of them did not end with 0; all routes, one after another, if
none is named. A rank is forked from this
process, which has imported PyTorch; but it comes to the end of a script, and its interpreter is taken down as any is.

``lost:ROUTE`` has a third rank, which is killed within its fourth step. The others catch the error, and end with 0.
``raises:ROUTE`` is the same, and they do not catch it: they end with 1, as Python does.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.planning.manager import manager
from tests.support import script_ranks, stopped_ranks
from tests.support.tiny_ddp import Head

RANKS = 2
MODELS = 10
_KEPT: list[Any] = []


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(200, 310), nn.ReLU(), nn.Linear(310, 190), nn.ReLU(), nn.Linear(190, 10))


def _step(model: Callable[..., Any], steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(8, 200)).square().mean().backward()


def attached(rule: str | None) -> None:
    """Ten DDP models, some with one bucket and some with several."""
    vars(manager)["Controller"] = lambda model: Head(model, 2)  # rows, whatever would be chosen here
    for k in range(MODELS):
        ddp = DistributedDataParallel(_model(), bucket_cap_mb=25 if k % 2 else 0.1)
        if rule is not None:
            _KEPT.append(commlib.attach(ddp, rule))
        _KEPT.append(ddp)
        _step(ddp, 8)


def server() -> None:
    """Parameter servers beside the ranks."""
    model = _model()
    made = commlib.ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.01), "ssp:1", "embedded")
    _KEPT.append((model, made))
    for _ in range(8):
        _step(model, 1)
        made.step()


def local() -> None:
    """Local steps, whose models meet."""
    for _ in range(MODELS):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        made = commlib.LocalSteps(model, "diloco", "int8", tau=2, optimizer=optimizer)
        _KEPT.append((model, made))
        for _ in range(5):
            optimizer.zero_grad()
            _step(model, 1)
            optimizer.step()
            made.step()


def sharded() -> None:
    """Models of FSDP2."""
    for _ in range(MODELS // 2):
        model = _model()
        fully_shard(model)
        _KEPT.append((model, commlib.attach(model, "int8")))
        _step(model, 4)


def zero() -> None:
    """Sharded optimizers."""
    for _ in range(MODELS // 2):
        model = _model()
        made = commlib.ShardedStep(model, torch.optim.SGD(model.parameters(), lr=0.01), "int8")
        _KEPT.append((model, made))
        for _ in range(4):
            _step(model, 1)
            made.step()


ROUTES: dict[str, tuple[str, Callable[[], None]]] = {
    "ddp": ("gloo", lambda: attached(None)),
    **{
        rule: ("gloo", lambda rule=rule: attached(rule))  # type: ignore[misc]
        for rule in ("none", "onebit", "powersgd:rank=2", "factors", "owners", "auto")
    },
    "zmq": ("zmq", lambda: attached("onebit")),
    "server": ("gloo", server),
    "local": ("gloo", local),
    "fsdp": ("gloo", sharded),
    "zero": ("gloo", zero),
}
"""Route → backend, and what a rank does."""


LOST = {
    **{f"{rule}": ("gloo", rule) for rule in stopped_ranks.ROUTES if rule != "ddp"},
    **{f"zmq {rule}": ("zmq", rule) for rule in ("none", "onebit", "powersgd:rank=2", "fsdp")},
}
"""Route → backend, and the name of its steps."""
KINDS = "lost", "raises"
UNHOOKED = "none", "auto"
"""Steps in which DDP exchanges by itself."""


def loses(route: str, delay_s: float) -> None:
    """Steps until one raises, because the last rank has been killed."""
    backend, steps = LOST[route]
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    step = stopped_ranks.ROUTES[steps]()
    _KEPT.append(step)
    for _ in range(3):
        step()
    dist.barrier()
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"past the barrier/{dist.get_rank()}", "yes")
    if dist.get_rank() == RANKS:
        store.wait([f"past the barrier/{rank}" for rank in range(RANKS)])  # a barrier's error would be the backend's
        signal.setitimer(signal.ITIMER_REAL, delay_s)  # it ends the process, wherever that is
    while True:
        step()


def script(kind: str, route: str, delay_s: float) -> None:
    """One rank's script; the interpreter ends after it."""
    torch.set_num_threads(1)
    if kind == "lost":
        # where DDP has no hook, it may be its own wait that ends with the backend's error (docs/adr/0012)
        with contextlib.suppress(commlib.CommlibError, *([RuntimeError] if LOST[route][1] in UNHOOKED else [])):
            loses(route, delay_s)
        return
    if kind == "raises":
        loses(route, delay_s)
    backend, run = ROUTES[route]
    dist.init_process_group(backend)
    run()
    if route != "server":  # the last to leave takes its servers along
        dist.destroy_process_group()


def main(route: str, runs: int) -> bool:
    """Prints ``ROUTE: BAD of ALL processes``, with the exit codes of those that were bad; whether there were any."""
    began, bad = time.monotonic(), list[int]()
    kind, name = (route.split(":", 1)) if route.startswith(tuple(f"{k}:" for k in KINDS)) else ("", route)
    for n in range(runs):
        delay_s = random.Random(n).uniform(1e-4, 0.02)
        codes = script_ranks.run(RANKS + bool(kind), lambda _, s=delay_s: script(kind, name, s))  # type: ignore[misc]
        if codes is None:  # in a rank, whose script is over
            sys.exit()
        bad += [code for code in codes[:RANKS] if code != (kind == "raises")]
    seconds = time.monotonic() - began
    wanted = int(kind == "raises")
    found = f"{len(bad)} of {RANKS * runs} processes did not end with {wanted} {bad or ''}({seconds:.0f} s)"
    print(f"{route}: {found}", flush=True)
    return bool(bad)


if __name__ == "__main__":
    importlib.import_module("tests.support.warm_codecs")  # else each rank would load them
    *named, count = sys.argv[1:]
    every = [*ROUTES, *(f"{kind}:{route}" for kind in KINDS for route in LOST)]
    bad = [route for route in named or every if main(route, int(count))]
    sys.exit(bool(bad))
