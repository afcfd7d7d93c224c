"""Random models, plans, batches and delays: no hang, the same bits everywhere, and DDP's gradient.

Every second plan is by rule; the others are a manager's that changes its mind at random after every step or two.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.exchange import sequencer
from commlib.exchange.factors.layers import FactorLayers
from commlib.groups.world import World
from commlib.planning.manager import manager
from commlib.planning.manager.candidates import CandidateModel
from commlib.planning.manager.decision import Decision
from commlib.planning.manager.measurements import Measurements
from tests.support.rank_pool import Fleet
from tests.support.tiers import full, long
from tests.support.tiny_ddp import same_everywhere

MODELS, JOBS, STEPS = 200, 10, 5
BY_ROWS = ("factors", "owners")


class Random(nn.Module):
    """A chain of linear layers; some are called twice, some by some ranks only."""

    def __init__(self, dice: random.Random, rank: int) -> None:
        super().__init__()
        widths = [dice.choice((3, 8, 24)) for _ in range(dice.randint(2, 6))]
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=dice.random() < 0.7) for a, b in itertools.pairwise(widths))
        self.width = widths[0]
        self.calls = [1 + (a == b and dice.random() < 0.5) for a, b in itertools.pairwise(widths)]
        users = [dice.randint(0, 2) if a == b and dice.random() < 0.4 else None for a, b in itertools.pairwise(widths)]
        self.skipped = [u is not None and u != rank for u in users[:-1]] + [False]  # every rank has a backward pass

    def forward(self, x: Tensor) -> Tensor:
        for layer, calls, skipped in zip(self.layers, self.calls, self.skipped, strict=True):
            for _ in range(0 if skipped else calls):
                x = layer(x).tanh()
        return x


@contextmanager
def delays(dice: random.Random) -> Iterator[None]:
    """A nap before every round of every bucket, and before any layer's rows leave."""
    classes: list[tuple[Any, str]] = [(sequencer.Sequencer, "_advance"), (FactorLayers, "_start")]
    originals = [getattr(c, name) for c, name in classes]

    def late(original: Any) -> Any:
        def call(*args: Any) -> Any:
            time.sleep(dice.random() * 0.003)
            return original(*args)

        return call

    for (c, name), original in zip(classes, originals, strict=True):
        setattr(c, name, late(original))
    try:
        yield
    finally:
        for (c, name), original in zip(classes, originals, strict=True):
            setattr(c, name, original)


class Whim:
    """Rank 0's head without a mind."""

    def __init__(self, model: CandidateModel) -> None:
        self._layers = [u.name for u in model.units.values() if u.shape is not None]
        self._dice = random.Random(",".join(self._layers))

    def first(self) -> Decision:
        return Decision(steps=1, skip=0, probe=False)

    def review(self, f: Measurements) -> Decision:
        some = [n for n in self._layers if self._dice.random() < 0.6]
        self._dice.shuffle(some)
        rows = {n: self._dice.randint(0, 9) for n in some}
        steps, watch = self._dice.randint(1, 2), self._dice.random() < 0.5
        routes = {n: self._dice.choice(BY_ROWS) for n in some}
        return Decision(routes, rows, steps, 0, watch, probe=False, phase="trial")


def train(world: World, seed: int, rules: Any) -> Tensor:
    """All gradients of five steps; in the second two passes add up."""
    torch.manual_seed(seed)
    module = Random(random.Random(seed), world.rank)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0005, find_unused_parameters=True)
    comm = None if rules is None else commlib.attach(ddp, rules, min_size=0)
    dice = random.Random(1000 * seed + world.rank)
    grads = []
    for step in range(STEPS):
        ddp.zero_grad()
        x = torch.randn(dice.randint(1, 9), module.width, generator=torch.Generator().manual_seed(dice.getrandbits(32)))
        if step == 1:
            with ddp.no_sync():
                ddp(x).square().mean().backward()
        ddp(x).square().mean().backward()
        grads += [p.grad.reshape(-1).clone() for p in ddp.parameters() if p.grad is not None]
    if comm is not None:
        comm.close()
    return torch.cat(grads)


def models(world: World, first: int, count: int) -> list[str]:
    head, vars(manager)["Controller"] = vars(manager)["Controller"], Whim
    try:
        return list(wrong_models(world, first, count))
    finally:
        vars(manager)["Controller"] = head


def wrong_models(world: World, first: int, count: int) -> Iterator[str]:
    for seed in range(first, first + count):
        dice = random.Random(seed)
        layers = len(Random(random.Random(seed), 0).layers)
        rules: Any = {f"layers.{i}.*": dice.choice(BY_ROWS) for i in range(layers) if dice.random() < 0.8} or "owners"
        if seed % 2:
            rules = "auto"
        with delays(random.Random(world.rank)):
            ours = train(world, seed, rules)
        ddps = train(world, seed, None)
        if not same_everywhere(world, ours):
            yield f"model {seed}: replicas differ"
        off = float((ours - ddps).abs().max() / ddps.abs().max().clamp_min(1e-9))
        if not off < 2e-6:
            yield f"model {seed}: {off:.2e} from DDP's gradient"


@pytest.mark.parametrize("count", [6, *full(60), *long(MODELS)])
def test_random_models_with_random_delays_have_ddps_gradients(fleet: Fleet, count: int) -> None:
    each = min(count, MODELS // JOBS)
    for first in range(0, count, each):
        for wrong in fleet.run(3, models, first, each):
            assert wrong == []
