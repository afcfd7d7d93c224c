"""A limit of rate over real processes: the same gradients, no more bytes than allowed, no hang."""

from __future__ import annotations

import datetime
import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.bench.results.socket_counters import traffic
from commlib.exchange import sequencer, throttled_group
from commlib.exchange.factors.layers import FactorLayers
from commlib.exchange.rate_limit import check_limit
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer, same_everywhere

FAST = commlib.RateLimit(2000, burst=4096)  # hardly a nap, and pieces of about a kilobyte
RULES: list[Any] = [
    *(
        "none",
        "fp16",
        "int8@gather",
        "onebit@scatter_gather",
        "none@scatter_gather",
        "powersgd:rank=2",
        "factors",
        "owners",
    ),
    {"0.*": "factors", "2.*": "powersgd:rank=2", "*": "topk:ratio=0.1@gather"},
    "blocks:keep=0.2,staleness=4,order=fifo,block=32",  # by magnitude, a last bit may decide which block goes
]


def both(world: World, rules: list[Any]) -> list[tuple[float, bool, float, float]]:
    found = []
    for rule in rules:
        trainers = [Trainer(world, rule, limit=limit) for limit in (None, FAST)]
        for t in trainers:
            t.train(12)
        free, limited = (t.weights() for t in trainers)
        sent, sent_limited = (float(t.comm.stats().wire_bytes) for t in trainers)
        off = float((free - limited).abs().max() / free.abs().max())
        found.append((off, same_everywhere(world, limited), sent, sent_limited))
        for t in trainers:
            t.close()
    return found


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
def test_under_a_limit_the_same_is_exchanged_as_without(fleet: Fleet, size: int):
    for report in fleet.run(size, both, RULES):
        for rule, (off, equal, free, limited) in zip(RULES, report, strict=True):
            assert equal, rule
            assert limited == pytest.approx(free, abs=1), rule
            # Between two ranks there is one order in which to add; between more, pieces are added in another,
            # in the dtype they travel in.
            most = 0 if size == 2 else 2e-3 if rule == "fp16" else 1e-5
            assert off <= most, rule


@contextmanager
def late(rank: int) -> Iterator[None]:
    """A nap before every round of every bucket, before any layer's rows leave, and before every piece's turn."""
    dice = random.Random(rank)
    classes: list[tuple[Any, str]] = [
        (sequencer.Sequencer, "_advance"),
        (FactorLayers, "_start"),
        (throttled_group.Throttle, "take"),
    ]
    originals = [getattr(c, name) for c, name in classes]

    def delayed(original: Any) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(dice.random() * 0.002)
            return original(*args)

        return call

    for (c, name), original in zip(classes, originals, strict=True):
        setattr(c, name, delayed(original))
    try:
        yield
    finally:
        for (c, name), original in zip(classes, originals, strict=True):
            setattr(c, name, original)


class Forked(nn.Module):
    """Layers that some ranks skip in some steps, so that DDP exchanges a map of used parameters beside the hook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(5))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == skipped else layer(x).tanh()
        return x


def forked(world: World, rule: Any, limit: Any, steps: int) -> tuple[Tensor, bool]:
    ddp = DistributedDataParallel(Forked(), bucket_cap_mb=0.004, find_unused_parameters=True)
    comm = commlib.attach(ddp, rule, min_size=0, limit=limit)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(world.rank)
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(6, 40, generator=gen), (step + world.rank) % 7).square().mean().backward()
        optimizer.step()
    comm.close()
    weights = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])
    return weights, same_everywhere(world, weights)


def stress(world: World, rules: list[Any], steps: int) -> list[tuple[float, bool]]:
    found = []
    for rule in rules:
        calm, _ = forked(world, rule, None, steps)
        with late(world.rank):
            hasty, equal = forked(world, rule, FAST, steps)
        found.append((float((calm - hasty).abs().max()), equal))
    return found


MIXED: list[Any] = [
    {"layers.0.*": "factors", "layers.1.*": "powersgd:rank=2", "layers.2.*": "int8@scatter_gather", "*": "owners"},
    {"layers.0.*": "topk:ratio=0.1@gather", "layers.4.*": "factors", "*": "blocks:keep=0.2,order=fifo,block=64"},
]


@pytest.mark.full
def test_random_delays_over_all_exchanges_change_nothing_and_nothing_hangs(fleet: Fleet):
    for report in fleet.run(3, stress, MIXED, 40):
        for off, equal in report:
            assert equal
            assert off < 1e-5


class Wide(nn.Module):
    """About 1.2 MB of gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 128))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class Clock(threading.Thread):
    """What has left at this process's sockets, every few milliseconds: (before the look, after it, bytes)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.looks: list[tuple[float, float, int]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.004):
            before, now = time.monotonic(), traffic()
            assert now is not None
            self.looks.append((before, time.monotonic(), now.sent))

    def end(self) -> list[tuple[float, float, int]]:
        self._ended.set()
        self.join(5)
        return self.looks


def watched(world: World, rule: Any, limit: commlib.RateLimit, steps: int) -> dict[str, Any]:
    ddp = DistributedDataParallel(Wide(), bucket_cap_mb=0.3)
    comm = commlib.attach(ddp, rule, min_size=0, limit=limit)
    held = [0.0]
    for kind, name in ((type(comm), "reduce"), (FactorLayers, "complete")):
        setattr(kind, name, _timed(getattr(kind, name), held))
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(world.rank))
    dist.barrier()
    clock = Clock()
    clock.start()
    start = time.monotonic()
    for _ in range(steps):
        ddp(x).square().mean().backward()
    seconds = time.monotonic() - start
    looks = clock.end()
    for kind, name in ((type(comm), "reduce"), (FactorLayers, "complete")):
        setattr(kind, name, getattr(kind, name).__wrapped__)
    comm.close()
    return {"seconds": seconds, "looks": looks, "sent": comm.stats().wire_bytes, "held": held[0]}


def _timed(original: Any, held: list[float]) -> Any:
    def call(*args: Any) -> Any:
        start = time.monotonic()
        try:
            return original(*args)
        finally:
            held[0] = max(held[0], time.monotonic() - start)

    call.__wrapped__ = original  # type: ignore[attr-defined]
    return call


@pytest.mark.alone
@pytest.mark.parametrize("rule", ["none", "none@scatter_gather", "fp16@gather", "factors"])
def test_at_the_sockets_no_window_has_more_than_the_limit_allows(fleet: Fleet, rule: str):
    limit = commlib.RateLimit(40, burst=100_000)
    for report in fleet.run(3, watched, rule, limit, 6):
        assert report["seconds"] >= limit.seconds(report["sent"] - limit.at_once)
        assert report["seconds"] <= 2 * limit.seconds(report["sent"]) + 2  # and it makes use of what is allowed
        looks = report["looks"]
        assert looks[-1][2] - looks[0][2] > 0.9 * report["sent"]
        for i, j in itertools.combinations(range(0, len(looks), 3), 2):
            sent, window = looks[j][2] - looks[i][2], looks[j][1] - looks[i][0]
            heads = 0.03 * sent + 10_000  # of Gloo's messages, and the store's
            assert sent <= limit.bytes_s * window + limit.at_once + heads


@pytest.mark.alone
@pytest.mark.parametrize("rule", ["none", "factors"])
def test_the_backward_pass_waits_for_no_turn(fleet: Fleet, rule: str):
    limit = commlib.RateLimit(2, burst=30_000)
    for report in fleet.run(2, watched, rule, limit, 1):
        assert report["seconds"] >= limit.seconds(report["sent"] - limit.at_once) > 1.5
        assert report["held"] < report["seconds"] / 8  # the largest bucket or layer takes a quarter at least


def auto(world: World) -> tuple[bool, bool]:
    trainer = Trainer(world, "auto", limit=commlib.RateLimit(100, burst=20_000))
    finite = trainer.train(25)
    equal = same_everywhere(world, trainer.weights())
    trainer.close()
    return all(finite), equal


@pytest.mark.full
def test_a_manager_measures_and_chooses_under_a_limit(fleet: Fleet):
    assert fleet.run(2, auto) == [(True, True)] * 2


def mismatched(world: World) -> str:
    limit = "50mbit" if world.rank == 0 else "60mbit"
    with pytest.raises(commlib.PlanMismatch) as caught:
        Trainer(world, "none", limit=limit, timeout=120)
    return str(caught.value)


def test_ranks_with_different_limits_are_told_so(fleet: Fleet):
    for text in fleet.run(2, mismatched):
        assert "limit: rank" in text
        assert "50mbit, bursts of 312500 bytes" in text
        assert "60mbit" in text


def refused(world: World, limit: Any) -> tuple[str, str]:
    try:
        Trainer(world, "none", limit=limit, timeout=120)
    except Exception as e:
        return type(e).__name__, str(e)
    return "", ""


@pytest.mark.parametrize(
    ("limit", "kind", "words"),
    [
        ("0mbit", "ValueError", "limit: a rate must be more than nothing"),
        ("fast", "ValueError", "limit: a rate is a number and kbit, mbit or gbit"),
        (50, "TypeError", 'limit is a rate as "50mbit" or a RateLimit'),
        # the fleet's process groups have a time-out of 60 s
        (commlib.RateLimit(0.001, burst=65536), "ValueError", "takes 524 s, longer than the process group's time-out"),
    ],
)
def test_attach_refuses_a_limit_that_is_none(fleet: Fleet, limit: Any, kind: str, words: str):
    for found, text in fleet.run(2, refused, limit):
        assert found == kind
        assert words in text


def test_a_limit_for_gradients_that_leave_without_the_host_is_refused() -> None:
    minute = datetime.timedelta(minutes=1)
    with pytest.raises(ValueError, match=r"gradients on cuda leave without the host \(NCCL\)"):
        check_limit(commlib.RateLimit(50), torch.device("cuda"), minute)
    check_limit(None, torch.device("cuda"), minute)
    check_limit(commlib.RateLimit(50), torch.device("cpu"), minute)


def test_a_burst_that_takes_longer_than_the_time_out_is_refused_with_both_numbers() -> None:
    limit = commlib.RateLimit(1, burst=1_250_000)
    check_limit(limit, torch.device("cpu"), datetime.timedelta(seconds=10))
    with pytest.raises(ValueError, match=r"takes 10 s, longer than the process group's time-out of 9 s.*Give"):
        check_limit(limit, torch.device("cpu"), datetime.timedelta(seconds=9))
