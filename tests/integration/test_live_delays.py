"""Swap, detach and attach again, with random delays: no order of arrival changes a bit."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.tiers import full, long
from tests.support.tiny_ddp import Trainer, through_delays

CHAIN = (  # one collective and many, with rows that leave early and without, with residuals and without
    {"0.*": "onebit@scatter_gather", "2.*": "powersgd", "*": "topk:ratio=0.1@gather"},
    {"0.*": "factors", "2.*": "powersgd", "*": "factors"},
    "none",
    "owners",
    {"2.*": "int8@scatter_gather", "*": "factors"},
)
EVERY = 4  # steps


class Turning(Trainer):
    """A plan lasts a few steps; each time that the chain comes round again, a step is plain DDP's.

    Each rank comes to a swap after a sleep of its own.
    """

    turns = 0

    def train(self, steps: int, disturb: Any = None) -> list[bool]:
        dice, finite = random.Random(self.world.rank), []
        while self.step < steps:
            time.sleep(dice.random() * 0.004)
            rule = CHAIN[self.turns % len(CHAIN)]
            if self.turns % len(CHAIN) or not self.turns:
                self.comm.swap(rule)
            else:
                self.comm.detach()
                finite += super().train(1)
                held = self.comm.state_dict()
                self.comm = commlib.attach(self.ddp, rule, min_size=0)
                self.comm.load_state_dict(held)
            self.turns += 1
            finite += super().train(min(EVERY, steps - self.step), disturb)
        return finite


def turned(world: World, steps: int) -> tuple[bool, bool, int]:
    made: list[Turning] = []

    def make() -> Turning:
        made.append(Turning(world, "onebit", cap=0.001))
        return made[-1]

    unchanged, equal, naps = through_delays(make, steps)
    assert naps > 2 * steps  # the delays were really there
    return unchanged, equal, made[-1].turns


@pytest.mark.parametrize(("steps", "swaps"), [*full((60, 14)), *long((200, 48))])
def test_random_delays_change_nothing_through_many_swaps(fleet: Fleet, steps: int, swaps: int) -> None:
    for unchanged, equal, turns in fleet.run(4, turned, steps):
        assert unchanged
        assert equal
        assert turns >= swaps
