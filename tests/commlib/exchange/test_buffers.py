"""An exchange makes its memory in a first step, and asks the system for none in later ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from commlib.bench.exchange.combinations import Pair, choose
from commlib.codecs.memory_store import MemoryStore
from commlib.ddp.buckets import BucketPlanner
from commlib.exchange import chunking
from commlib.exchange.buffers import SpareBuffers, StepBuffers
from commlib.exchange.collectives import Rounds
from commlib.exchange.hierarchy import Hierarchy
from commlib.exchange.registry import BY_ROWS
from commlib.exchange.step_commit import StepCommit
from commlib.groups.world import World
from commlib.planning.planner import make_plan
from commlib.planning.simulate import run
from commlib.runtime.layers import LayerSpec
from tests.support.tiers import full

CPU = torch.device("cpu")
SIZE = 2
SHAPES = {"conv.weight": (16, 8, 3, 3), "fc.weight": (300, 130), "fc.bias": (300,), "norm": ()}
BLOCKS = -(-300 * 130 // 1024)  # of the largest layer
NOW_AND_THEN = {"twobit", "dct"}  # for local steps: between two exchanges lie many steps
PAIRS = [p for p in choose(["all"]).pairs if p.exchange not in BY_ROWS]


def test_what_is_asked_for_again_is_there_still() -> None:
    arena = StepBuffers()
    first = [arena.bytes(100, CPU), arena.empty((3, 4), torch.float32, CPU)]
    assert first[0].count_nonzero() == 0
    arena.rewind()
    again = [arena.bytes(100, CPU), arena.empty((3, 4), torch.float32, CPU)]
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in first]
    assert arena.bytes(100, CPU).data_ptr() != first[0].data_ptr()


@pytest.mark.parametrize("other", [((3, 5), torch.float32), ((3, 4), torch.bfloat16)])
def test_what_is_not_as_before_is_made_anew(other: tuple[tuple[int, ...], torch.dtype]) -> None:
    arena = StepBuffers()
    arena.empty((3, 4), torch.float32, CPU)
    arena.rewind()
    made = arena.empty(*other, CPU)
    assert (tuple(made.shape), made.dtype) == other
    arena.rewind()
    assert arena.empty(*other, CPU).data_ptr() == made.data_ptr()


def test_what_is_asked_for_no_more_is_not_kept() -> None:
    arena = StepBuffers()
    kept = arena.bytes(8, CPU)
    gone = [arena.bytes(8, CPU).data_ptr() for _ in range(3)]
    arena.rewind()
    arena.bytes(8, CPU)
    arena.rewind()
    assert arena.bytes(8, CPU).data_ptr() == kept.data_ptr()
    assert len(arena._made) == 1 < len(gone)


def test_buffers_of_an_exchange_are_lent_to_its_next_time_only_and_freed_if_there_is_none() -> None:
    spare, places = SpareBuffers(), dict[str, list[int]]()
    for step in range(8):
        for key in ("in every step", *(["in every other"] if step % 2 else []), *(["once"] if step == 1 else [])):
            arena = spare.lend(key, step)
            places.setdefault(key, []).append(arena.bytes(64, CPU).data_ptr())
            assert spare.lend(key, step)._made == []  # to another at the same time: its own
            spare.take_back(key, arena, step)
    assert len(set(places["in every step"])) == len(set(places["in every other"])) == 1
    assert spare._spare.keys() == {"in every step", "in every other"}


class Bucket:
    """As much of DDP's as is looked at."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(rank)
        sizes = [torch.Size(s).numel() for s in SHAPES.values()]
        self._flat = torch.randn(sum(sizes), generator=generator).to(dtype)
        self._parameters = [torch.zeros(s, dtype=dtype) for s in SHAPES.values()]
        self._views = [v.view(s) for v, s in zip(self._flat.split(sizes), SHAPES.values(), strict=True)]

    def index(self) -> int:
        return 0

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._views

    def parameters(self) -> list[Tensor]:
        return self._parameters


class Rank:
    """One rank's side, as a hook drives it."""

    def __init__(self, rule: str, rank: int, dtype: torch.dtype, local: int) -> None:
        self.bucket = Bucket(rank, dtype)
        size = SIZE * local
        levels = (
            Hierarchy(tuple(tuple(range(n, n + local)) for n in range(0, size, local)), rank) if local > 1 else None
        )
        specs = [LayerSpec.of(p, name) for name, p in zip(SHAPES, self.bucket.parameters(), strict=True)]
        self.plan = make_plan(specs, rule, world=SIZE, min_size=0)
        self.store = MemoryStore()
        self.steps = StepCommit(self.store)
        self.sorter = BucketPlanner(specs, World(rank, size), levels, self.store, self.steps, dense_steps=0, seed=0)

    def rounds(self) -> Rounds:
        for trip in self.sorter.rounds(self.bucket, list(SHAPES), self.plan, None):
            yield from trip


def counted(rounds: Rounds, sizes: list[int]) -> Rounds:
    """The same, noting down the bytes of every tensor that is made in between; not those of the collectives."""
    while True:
        with torch.autograd.profiler.profile(profile_memory=True) as seen:
            batch = next(rounds, None)
        sizes += _made(seen)
        if batch is None:
            return
        yield batch


def _made(seen: torch.autograd.profiler.profile) -> Iterator[int]:
    # PyTorch makes a tensor of one value of every Python number that it is given.
    return (e.self_cpu_memory_usage for e in seen.function_events or () if e.self_cpu_memory_usage > 8)


def made(rule: str, dtype: torch.dtype, steps: int, local: int = 1) -> list[int]:
    """Bytes of the tensors made in the last of so many steps, with so many ranks on each of two nodes."""
    ranks = [Rank(rule, rank, dtype, local) for rank in range(SIZE * local)]
    return trained(ranks, steps, local)


def trained(ranks: list[Rank], steps: int, local: int = 1) -> list[int]:
    """Bytes of the tensors that these ranks make in the last of so many steps, which they take."""
    sizes: list[int] = []
    for _ in range(steps):
        sizes.clear()
        for r in ranks:
            r.steps.begin(remembers=True)
        run([counted(r.rounds(), sizes) for r in ranks], local)
        for r in ranks:
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(r.bucket.buffer())
            r.steps.submitted(done, last=True)
            r.steps.settle()
    assert all(r.steps.count == steps for r in ranks)
    return sizes


def test_a_first_step_is_seen_to_make_some() -> None:
    assert sum(made("onebit@scatter_gather", torch.float32, 1)) > 1000


DTYPES = [
    pytest.param(torch.bfloat16, id="bfloat16"),  # what is reduced has another type than what is trained: more is kept
    pytest.param(torch.float32, id="float32", marks=pytest.mark.full),
]
SOME = [p for p in PAIRS if p.codec in ("none", "onebit", "topk", "powersgd")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", [*SOME, *full(*(p for p in PAIRS if p not in SOME))], ids=str)
def test_a_later_step_makes_none(pair: Pair, dtype: torch.dtype) -> None:
    sizes = made(str(pair), dtype, 3)
    if pair.codec == "blocks":  # torch.sort makes a number for each of those that it sorts
        assert max(sizes) <= 8 * BLOCKS
    elif pair.codec in NOW_AND_THEN:  # they make some, and no more from step to step
        assert sum(sizes) == sum(made(str(pair), dtype, 2)) > 0
    else:
        assert sizes == []


@pytest.mark.parametrize("rule", ["onebit@scatter_gather", "int8:block=10@gather", "fp16@dense"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_layer_make_none(rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "SIZE", 20_000)
    assert made(rule, dtype, 4) == []


def test_two_levels_make_none_of_their_own() -> None:
    assert made("onebit", torch.float32, 4, local=2) == []


@pytest.mark.parametrize(("exchange", "times"), [("gather", SIZE), ("scatter_gather", 2)])
def test_room_is_for_what_comes_and_what_is_sent_has_none_of_its_own(exchange: str, times: int) -> None:
    ranks = [Rank(f"int8@{exchange}", rank, torch.float32, 1) for rank in range(SIZE)]
    trained(ranks, 2)
    sent = sum(p.route.codec.nbytes(p.spec) for p in ranks[0].plan.layers.values())
    for r in ranks:
        held = sum(t.nbytes for arena, _ in r.sorter._spare._spare.values() for t in arena._made)
        assert times * sent <= held < 1.02 * times * sent  # but for what aligns payloads
