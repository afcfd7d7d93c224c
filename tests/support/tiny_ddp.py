"""A small DDP training that tests look at closely."""

from __future__ import annotations

import datetime
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange import sequencer
from commlib.groups.store import store_of
from commlib.groups.world import World
from commlib.planning.manager import manager
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.measurements import Measurements

ANY_EXCHANGE = (
    *("none", "fp16", "bf16", "onebit", "onebit:axis=tensor", "sign", "int8", "int4", "qsgd", "ternary", "natural"),
    *("topk:ratio=0.1", "topk:ratio=0.1,values=int8", "randomk:ratio=0.1"),
)
PAIRS = (  # every codec over every exchange that takes it; codecs with a ratio keep enough of a tiny layer
    *(f"{codec}@dense" for codec in ("none", "fp16", "bf16", "randomk:ratio=0.1")),
    *(f"{codec}@{exchange}" for codec in ANY_EXCHANGE for exchange in ("gather", "scatter_gather")),
    "dgc:ratio=0.05@gather",
    "powersgd:rank=2@gather",
    "powersgd:rank=2@low_rank",
    "blocks:keep=0.2,staleness=6,block=32@blocks",
    "none@factors",
    "none@owners",
)


def model() -> nn.Sequential:
    """64 → 48 → 48 → 5, the same on every rank and at every call."""
    torch.manual_seed(1234)
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 5))


def batch(world: World, step: int) -> tuple[Tensor, Tensor]:
    """(8, 64) inputs and (8,) classes; different on every rank and at every step."""
    gen = torch.Generator().manual_seed(7919 * step + world.rank)
    return torch.randn(8, 64, generator=gen), torch.randint(5, (8,), generator=gen)


class Trainer:
    """DDP, SGD with momentum, and a commlib hook unless ``rule`` is None.

    Args:
        world: this rank.
        rule: what is attached.
        cap: DDP's bucket_cap_mb; the default makes several buckets.
        scaler: used for the loss, and told to the hook.
        style: "attach", or "register": PyTorch's own, with a hook though it may have nothing to do.
        **options: of ``attach``; by default no layer is too small to compress.
    """

    def __init__(
        self,
        world: World,
        rule: Any,
        *,
        cap: float = 0.005,
        scaler: torch.amp.GradScaler | None = None,
        style: str = "attach",
        **options: Any,
    ) -> None:
        self.world, self.scaler = world, scaler
        self.module = model()
        self.ddp = DistributedDataParallel(self.module, bucket_cap_mb=cap)
        self.comm: Any = None
        if rule is not None:
            options = {"min_size": 0, "scaler": scaler, **options}
            made = commlib.attach if style == "attach" else commlib.HookState
            self.comm = made(self.ddp, rule, **options)
            if style == "register":
                self.ddp.register_comm_hook(self.comm, commlib.hook)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        self.step = 0

    def train(self, steps: int, disturb: Callable[[int], None] | None = None) -> list[bool]:
        """Trains; returns for every step whether all exchanged gradients were finite, and skips those that were not.

        Args:
            steps: how many.
            disturb: called with the step's number before the exchange begins, to register hooks on parameters.
        """
        finite = []
        for _ in range(steps):
            if disturb is not None:
                disturb(self.step)
            x, y = batch(self.world, self.step)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.ddp(x), y)
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            finite.append(all(bool(p.grad.isfinite().all()) for p in self.module.parameters() if p.grad is not None))
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif finite[-1]:
                self.optimizer.step()
            self.step += 1
        return finite

    def weights(self) -> Tensor:
        """All parameters, flat."""
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()])

    def close(self) -> None:
        """Ends the hook's threads."""
        if self.comm is not None:
            self.comm.close()


@contextmanager
def torchrun(world: World, local: int) -> Iterator[None]:
    """What torchrun would set for a rank, with so many on each node."""
    node, place = divmod(world.rank, local)
    made = {"RANK": world.rank, "WORLD_SIZE": world.size}
    made |= {"GROUP_RANK": node, "LOCAL_RANK": place, "LOCAL_WORLD_SIZE": local}
    os.environ.update({k: str(v) for k, v in made.items()})
    try:
        yield
    finally:
        for name in made:
            del os.environ[name]


PATIENT = datetime.timedelta(seconds=120)
"""For what comes, however slow the machine is."""


def say(what: str) -> None:
    """Tells all ranks of this job, by the store of their process group."""
    store_of(dist.group.WORLD).set(what, b"")


def heard(what: str) -> None:
    """Waits until a rank has said so."""
    store_of(dist.group.WORLD).wait([what], PATIENT)


def says_when_it_waits(trainer: Any) -> None:
    """From now on this rank says ``waits/STEP`` once its thread that trains waits for others, and is timed as it does.

    Args:
        trainer: with ``comm`` and ``step``.
    """
    comm = trainer.comm
    waiting, sequencer = comm._monitor.waiting, getattr(comm, "_sequencer", None)

    @contextmanager
    def told() -> Iterator[None]:
        with waiting():
            say(f"waits/{trainer.step}")
            yield

    vars(comm._monitor)["waiting"] = told
    if sequencer is not None:
        join = sequencer.join

        def told_join(*args: Any) -> Any:
            say(f"waits/{trainer.step}")
            return join(*args)

        vars(sequencer)["join"] = told_join


def same(a: Any, b: Any) -> bool:
    """Whether two values, or trees of dicts and lists of them, are equal to the last bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Logged(logging.Handler):
    """What commlib logs inside its block."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("commlib").addHandler(self)
        return self.messages

    def __exit__(self, *_: object) -> None:
        logging.getLogger("commlib").removeHandler(self)


def same_everywhere(world: World, x: Tensor) -> bool:
    """Whether all ranks hold the same bytes."""
    others = [torch.empty_like(x) for _ in range(world.size)]
    dist.all_gather(others, x)
    return all(torch.equal(x, o) for o in others)


def poison(module: nn.Module, name: str, value: float) -> Callable[[], None]:
    """Puts a non-finite value into one parameter's next gradient; returns what undoes it."""
    parameter = dict(module.named_parameters())[name]

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[3] = value
        return grad

    handle = parameter.register_hook(spoil)
    return lambda: handle.remove()


def train_poisoned(trainer: Trainer, steps: int, at: int, name: str, value: float) -> list[bool]:
    """As :meth:`Trainer.train`; in step ``at`` the last rank's gradient of one parameter has a value not finite."""
    undo: list[Callable[[], None]] = []

    def disturb(step: int) -> None:
        while undo:
            undo.pop()()
        if step == at and trainer.world.rank == trainer.world.size - 1:
            undo.append(poison(trainer.module, name, value))

    return trainer.train(steps, disturb)


def owed(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Layer → (1/P)·Σ pending values of all ranks' state dicts, owners' stripes included; float64."""
    total: dict[str, Tensor] = {}
    for state in states:
        for entries in state["ranks"].values():
            for name, slots in entries.items():
                shape = [int(n) for n in state["layers"][name].split()[0].split("x")]
                sum_ = total.setdefault(name, torch.zeros(shape, dtype=torch.float64))
                for entry in slots.values():
                    if entry["role"] == "pending":
                        value, start = entry["value"].double(), entry["start"]
                        whole = list(value.shape) == shape and start == 0 and entry is slots.get("residual")
                        sum_[start : start + len(value)] += value / (state["world_size"] if whole else 1)
    return total


def through_delays(make: Callable[[], Any], steps: int) -> tuple[bool, bool, int]:
    """Trains twice, the second time with random sleeps before every round of every bucket, the hook's too, and its end.

    Args:
        make: a Trainer, or what trains, ends and has weights as it does.
        steps: how many.

    Returns:
        Whether the weights are the same as without sleeps; whether they are the same on every rank; how often it slept.
    """
    calm = make()
    calm.train(steps)
    calm.close()
    dice, naps = random.Random(calm.world.rank), 0
    patched: Any = sequencer.Sequencer
    originals = {name: getattr(patched, name) for name in ("_advance", "single", "_ended")}

    def late(original: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal naps
            naps += 1
            time.sleep(dice.random() * 0.004)
            return original(*args)

        return call

    for name, original in originals.items():
        setattr(patched, name, late(original))
    try:
        hasty = make()
        hasty.train(steps)
        hasty.close()
    finally:
        for name, original in originals.items():
            setattr(patched, name, original)
    return torch.equal(calm.weights(), hasty.weights()), same_everywhere(calm.world, hasty.weights()), naps


class Head:
    """Dense for the first few exchanges, then all rows by factors."""

    def __init__(self, model: Any, dense: int) -> None:
        self.layers = [u.name for u in model.units.values() if u.shape is not None][::-1]
        self.dense, self.seen = dense, list[Measurements]()

    def first(self) -> Decision:
        return Decision(steps=self.dense, probe=False, skip=0)

    def review(self, f: Measurements) -> Decision:
        self.seen.append(f)
        routes = dict.fromkeys(self.layers, "factors")
        return Decision(routes, dict.fromkeys(routes, 8), steps=1000, probe=False, phase="steady")


H = TypeVar("H")


@contextmanager
def controlled(make: Callable[[Any], H]) -> Iterator[list[H]]:
    """Inside, managers get a controller that ``make`` makes of their model; the list has all that were made."""
    made: list[H] = []

    def kept(model: Any) -> H:
        made.append(make(model))
        return made[-1]

    original, vars(manager)["Controller"] = vars(manager)["Controller"], kept
    try:
        yield made
    finally:
        vars(manager)["Controller"] = original


def head(dense: int) -> AbstractContextManager[list[Head]]:
    """Controllers that choose rows after so many dense exchanges, as :func:`controlled`."""
    return controlled(lambda model: Head(model, dense))


class Meeting:
    """An all-gather or all-to-all that happens when the last rank has come."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.outs: list[Tensor] = []
        self.payloads: list[Tensor] = []

    def _allgather_base(self, out: Tensor, payload: Tensor) -> Any:
        assert len({len(p) for p in [*self.payloads, payload]}) == 1, "ranks send different numbers of bytes"
        self.outs.append(out)
        self.payloads.append(payload.clone())
        if len(self.outs) == self.size:
            for o in self.outs:
                o.copy_(torch.cat(self.payloads))
            self.outs, self.payloads = [], []
        return self

    def alltoall_base(self, out: Tensor, send: Tensor, out_splits: list[int], splits: list[int]) -> Any:
        assert out_splits == [splits[len(self.outs)]] * self.size, "ranks send other numbers of bytes than are expected"
        self.outs.append(out)
        self.payloads.append(send.clone())
        if len(self.outs) == self.size:
            parts = [torch.split(p, splits) for p in self.payloads]
            for rank, o in enumerate(self.outs):
                o.copy_(torch.cat([p[rank] for p in parts]))
            self.outs, self.payloads = [], []
        return self

    def wait(self) -> None:
        assert not self.outs, "a rank is missing"


def step(ddp: DistributedDataParallel, x: Tensor) -> None:
    """A step of plain SGD, without an optimizer."""
    ddp.zero_grad()
    ddp(x).square().mean().backward()
    with torch.no_grad():
        for p in ddp.parameters():
            assert p.grad is not None
            p.sub_(p.grad, alpha=0.05)
