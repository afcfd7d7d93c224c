"""Over real processes: replicas, dense as DDP, bytes counted at the process group."""

from __future__ import annotations

import pytest
import torch

import commlib
from commlib.groups.world import World
from tests.support.rank_pool import Fleet
from tests.support.thread_groups import counted
from tests.support.tiers import full, long
from tests.support.tiny_ddp import ANY_EXCHANGE, PAIRS, Trainer, same_everywhere, through_delays

SOME = tuple(p for p in PAIRS if p.partition("@")[0] not in ANY_EXCHANGE or p.endswith("@scatter_gather"))
"""Every codec, and every exchange."""


def many_steps(world: World, pairs: list[str], steps: int) -> dict[str, tuple[bool, bool, float, float, float]]:
    report = {}
    for pair in pairs:
        with counted(world) as sent:
            trainer = Trainer(world, pair, style="register")
            finite = trainer.train(steps)
            stats = trainer.comm.stats()
            trainer.close()
        assert stats.steps == steps
        assert stats.skipped == 0
        assert abs(sum(layer.wire_bytes for layer in stats.layers.values()) - stats.wire_bytes) <= len(stats.layers)
        report[pair] = (
            same_everywhere(world, trainer.weights()),
            all(finite),
            sum(sent),
            stats.wire_bytes,
            stats.dense_bytes,
        )
    return report


@pytest.mark.parametrize(
    ("size", "pairs", "steps"),
    [(2, SOME, 5), *full((2, PAIRS, 20), (3, PAIRS, 20)), *long((2, PAIRS, 50), (3, PAIRS, 50))],
)
def test_replicas_are_bitwise_equal_after_many_steps_and_bytes_at_the_process_group_equal_stats(
    fleet: Fleet, size: int, pairs: tuple[str, ...], steps: int
):
    reports = fleet.run(size, many_steps, list(pairs), steps)
    values = 64 * 48 + 48 + 48 * 48 + 48 + 48 * 5 + 5
    for report in reports:
        assert list(report) == list(pairs)
        for pair, (equal, finite, sent, said, dense) in report.items():
            assert equal, pair
            assert finite, pair
            assert said == pytest.approx(sent, abs=1), pair
            assert dense == pytest.approx(steps * 2 * (size - 1) / size * 4 * values, abs=1), pair


def dense_and_plain(world: World, cap: float) -> bool:
    results = []
    for rule, style in ((None, ""), ("none", "attach"), ("none", "register")):
        trainer = Trainer(world, rule, cap=cap, style=style)
        trainer.train(8)
        trainer.close()
        results.append(trainer.weights())
    return torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("size", [3, *full(2, 4)])
@pytest.mark.parametrize("cap", [0.005, 25])
def test_attach_without_a_codec_is_plain_ddp_bit_for_bit(fleet: Fleet, size: int, cap: float):
    assert all(fleet.run(size, dense_and_plain, cap))


def big_layers(world: World) -> dict[str, float]:
    ratios = {}
    for spec in ("onebit", "onebit:axis=tensor"):
        module = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 64))
        ddp = torch.nn.parallel.DistributedDataParallel(module)
        comm = commlib.attach(ddp, spec)
        for _ in range(3):
            ddp(torch.randn(4, 64)).square().sum().backward()
        layers = [s for s in comm.stats().layers.values() if s.numel >= 65536]
        assert len(layers) == 2
        ratios[spec] = min(s.dense_bytes / s.wire_bytes for s in layers)
        comm.close()
    return ratios


def test_one_bit_sends_at_least_25_times_less_on_big_layers_and_31_times_with_one_pair_of_means(fleet: Fleet):
    for ratios in fleet.run(2, big_layers):
        assert ratios["onebit"] >= 25
        assert ratios["onebit:axis=tensor"] >= 31


def delayed(world: World, rule: str | dict[str, str], repetitions: int) -> tuple[bool, bool]:
    unchanged, equal, naps = through_delays(lambda: Trainer(world, rule, cap=0.001, style="register"), repetitions)
    assert naps > 3 * repetitions  # the delays were really there, in more than one bucket
    return unchanged, equal


ROUNDS = {"0.*": "onebit@scatter_gather", "2.*": "powersgd", "*": "topk:ratio=0.1@gather"}
DELAYED: list[str | dict[str, str]] = [ROUNDS, {"0.*": "factors", "2.*": "powersgd", "*": "factors"}, "none"]


@pytest.mark.parametrize(
    ("rule", "steps"),
    [(ROUNDS, 12), *full(*((rule, 60) for rule in DELAYED)), *long(*((rule, 200) for rule in DELAYED))],
)
def test_random_delays_between_rounds_change_nothing(fleet: Fleet, rule: str | dict[str, str], steps: int):
    for unchanged, equal in fleet.run(4, delayed, rule, steps):
        assert unchanged
        assert equal
