"""Whatever a worker does, and whatever was foretold: gradients and values are those they would be without a cache."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from commlib.errors import PeerLost
from commlib.runtime.streams import StreamEvent
from commlib.server.job.chunks import Chunk, ParameterPiece
from commlib.server.worker.prefetch import PrefetchCache
from commlib.testing.accelerator import SimulatedAccelerator, StreamRace
from tests.support.tiers import examples

CPU = torch.device("cpu")
DEADLINE = 20.0


class Shards:
    """Answers to a push of g with 2g + 1, after a moment, and counts."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.news = rng, threading.Condition()
        self.answers: dict[str, tuple[Tensor, Mapping[int, int]]] = {}
        self.pushed: list[tuple[str, list[float]]] = []

    def push(self, key: str, gradient: Tensor) -> None:
        self._moment()
        with self.news:
            self.pushed.append((key, gradient.tolist()))
            self.answers[key] = 2 * gradient + 1, {0: len(self.pushed)}
            self.news.notify_all()

    def values(self, key: str) -> tuple[Tensor, Mapping[int, int]]:
        self._moment()
        with self.news:
            if not self.news.wait_for(lambda: key in self.answers, DEADLINE):
                raise PeerLost(f"no values of {key}")
            return self.answers[key]

    def _moment(self) -> None:
        if self.rng.random() < 0.1:
            time.sleep(0.001)


def chunks(rng: random.Random, count: int) -> list[Chunk]:
    """Of one piece or two, some of them large against the others."""
    sizes = [rng.choice([1, 10, 300, 2000]) for _ in range(count)]
    return [
        Chunk((ParameterPiece(f"{i}", 0, n),) + ((ParameterPiece(f"{i}b", 0, 3),) if i % 2 else ()), torch.float32)
        for i, n in enumerate(sizes)
    ]


def order(rng: random.Random, keys: list[str], asked: set[str]) -> list[tuple[str, str]]:
    """An iteration: values of what was asked for, and gradients of some, in any order that there can be."""
    some = rng.sample(keys, rng.randint(0, len(keys)))
    return [("take", k) for k in some if k in asked] + [("push", k) for k in rng.sample(keys, len(keys))]


def trained(seed: int, count: int, ahead: int) -> None:
    """Iterations in which every value and every gradient is looked at."""
    rng = random.Random(seed)
    shards, own = Shards(rng), chunks(rng, count)
    cache, by_key = PrefetchCache(shards, own, CPU, ahead), {c.key: c for c in own}
    last: dict[str, Tensor] = {}
    expected: list[tuple[str, list[float]]] = []
    asked: set[str] = set()
    iteration, before, changes = order(rng, list(by_key), asked), None, 0
    try:
        for _ in range(10):
            for kind, key in iteration:
                if kind == "push":
                    parts = [torch.randn(p.end - p.begin) for p in by_key[key].pieces]
                    last[key] = torch.cat(parts)
                    expected.append((key, last[key].tolist()))
                    cache.push(key, parts, lambda g, key=key: shards.push(key, g))  # type: ignore[misc]
                    cache.asked(key)
                    asked.add(key)
                    for part in parts:
                        part.zero_()  # it is not needed any more
                else:
                    shards_values = 2 * last[key] + 1
                    assert torch.equal(cache.values(key)[0], shards_values)
                    asked.discard(key)
            cache.end_step()
            changes += iteration != before
            assert cache.plans == changes
            before = iteration
            stays = [("take", k) for k in asked if rng.random() < 0.5] + [("push", k) for k in by_key]
            possible = all(kind == "push" or key in asked for kind, key in iteration)
            iteration = iteration if possible and rng.random() < 0.7 else stays
        cache.settle()
        assert shards.pushed == expected
    finally:
        cache.close()


SCENES = st.integers(0, 1 << 32), st.integers(1, 6), st.integers(1, 9)


@settings(max_examples=examples(30))
@given(*SCENES)
def test_what_is_moved_is_what_it_was_in_any_order_and_a_deviation_is_noticed(
    seed: int, count: int, ahead: int
) -> None:
    trained(seed, count, ahead)


@settings(max_examples=examples(10))
@given(*SCENES)
def test_on_a_device_streams_order_whatever_is_moved(seed: int, count: int, ahead: int) -> None:
    with SimulatedAccelerator():
        trained(seed, count, ahead)


def test_values_that_are_not_waited_for_are_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamEvent, "hold", lambda self: None)
    with pytest.raises(StreamRace, match="which is not behind"), SimulatedAccelerator():
        trained(0, 4, 2)


def test_values_come_before_they_are_needed_in_buffers_for_a_few_chunks_not_for_all() -> None:
    shards = Shards(random.Random(0))
    own = [Chunk((ParameterPiece(str(i), 0, 1000),), torch.float32) for i in range(20)]
    keys = [c.key for c in own]
    cache = PrefetchCache(shards, own, CPU, ahead=2)
    try:
        for step in range(4):
            for key in keys if step else ():
                cache.values(key)
            for key in reversed(keys):
                cache.push(key, [torch.ones(1000)], lambda g, key=key: shards.push(key, g))  # type: ignore[misc]
                cache.asked(key)
            cache.end_step()
        assert cache.plans == 2  # the first step had nothing to take
        assert cache.nbytes <= 8 * 4096  # of 40 buffers
        cache.values(keys[0])
        assert set(cache._coming) == {keys[1], keys[2]}
    finally:
        cache.close()


def test_what_goes_wrong_in_the_background_is_raised_where_it_is_needed() -> None:
    chunk = Chunk((ParameterPiece("a", 0, 4),), torch.float32)

    class Gone:
        def values(self, key: str) -> tuple[Tensor, Mapping[int, int]]:
            raise PeerLost(f"nobody has {key}")

    def refuse(gradient: Tensor) -> None:
        raise PeerLost("nobody takes it")

    cache = PrefetchCache(Gone(), [chunk], CPU)
    try:
        with pytest.raises(PeerLost, match="nobody has a"):
            cache.values(chunk.key)
        cache.push(chunk.key, [torch.ones(4)], refuse)
        cache.asked(chunk.key)
        for found in (cache.settle, lambda: cache.values(chunk.key)):
            with pytest.raises(PeerLost, match="nobody takes it"):
                found()
        with pytest.raises(PeerLost, match="nobody takes it"):
            cache.push(chunk.key, [torch.ones(4)], refuse)
    finally:
        cache.close()
        cache.close()
    with pytest.raises(ValueError, match="1 operation or more"):
        PrefetchCache(Gone(), [chunk], CPU, ahead=0)
