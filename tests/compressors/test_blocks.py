"""Which blocks go: by importance, none held too long, and so many in every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs.base import LayerSpec, Memory
from commlib.compressors.blocks import Blocks, choice


def chosen_by(codec: Blocks, sizes: Tensor, memory: Memory, seed: int) -> list[int]:
    out = torch.full((codec.count(LayerSpec("x", (len(sizes) * codec.block,))),), -1)
    codec.choose(sizes, memory, seed, out)
    found: list[int] = out.tolist()
    return found


ORDERS = st.sampled_from(["magnitude", "fifo", "random"])


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 6)), max_size=40),
    st.integers(1, 6),
    st.integers(0, 40),
)
def test_those_that_are_due_go_first_then_the_most_important(blocks, staleness, count):
    importance = torch.tensor([i for i, _ in blocks])
    held = torch.tensor([float(h) for _, h in blocks])
    out = torch.full((min(count, len(blocks)),), -1)
    choice(importance, held, staleness, out)
    chosen = out.tolist()
    assert chosen == sorted(set(chosen))
    assert all(0 <= b < len(blocks) for b in chosen)
    left = [b for b in range(len(blocks)) if b not in chosen]
    due = [b for b in range(len(blocks)) if held[b] >= staleness]
    if any(b in left for b in due):  # too many at once: only such go, and the longest held
        assert set(chosen) <= set(due)
        assert not chosen or min(held[chosen]) >= max(held[b] for b in due if b in left)
    else:
        free = [importance[b].item() for b in chosen if b not in due]
        assert not free or not left or min(free) >= max(importance[b].item() for b in left)


@given(st.integers(1, 400), st.floats(0.01, 1), st.integers(1, 12), ORDERS, st.integers(0, 99))
def test_no_block_is_held_longer_than_staleness_and_each_step_sends_as_many(n, keep, staleness, order, seed):
    codec = Blocks(keep=keep, staleness=staleness, order=order, block=4)
    spec, gen = LayerSpec("x", (n,)), torch.Generator().manual_seed(seed)
    memory = Memory.zeros(codec, spec)
    last = [-1] * codec.blocks(spec)
    for step in range(3 * staleness + 3):
        sizes = torch.rand(len(last), generator=gen) ** 4
        chosen = chosen_by(codec, sizes, memory, seed + step)
        assert len(set(chosen)) == codec.count(spec)
        for b in chosen:
            last[b] = step
        # held in the steps since: one that went in the last step is held for none
        assert all(step - went <= staleness for went in last)


@given(ORDERS, st.integers(0, 99))
def test_a_share_below_what_staleness_asks_sends_that_and_takes_turns(order, seed):
    codec = Blocks(keep=0.01, staleness=4, order=order, block=1)
    spec, memory = LayerSpec("x", (50,)), Memory.zeros(codec, LayerSpec("x", (50,)))
    assert codec.count(spec) == 10
    rounds = [chosen_by(codec, torch.rand(50), memory, seed + step) for step in range(10)]
    assert sorted(b for chosen in rounds[:5] for b in chosen) == list(range(50))
    assert rounds[:5] == rounds[5:]


def test_magnitude_prefers_the_largest_where_nothing_is_due() -> None:
    codec, spec = Blocks(keep=0.2, staleness=1000, block=1), LayerSpec("x", (100,))
    sizes = torch.arange(100.0)
    memory = Memory.zeros(codec, spec)
    assert chosen_by(codec, sizes, memory, 0) == list(range(80, 100))
    assert chosen_by(codec, sizes.flip(0), memory, 0) == list(range(20))


def test_random_is_drawn_from_the_seed_alone() -> None:
    codec, spec = Blocks(keep=0.2, staleness=1000, order="random", block=1), LayerSpec("x", (1000,))
    drawn = [chosen_by(codec, torch.rand(1000), Memory.zeros(codec, spec), s) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_state_of_a_looser_bound_sends_the_longest_held_first() -> None:
    loose, tight = Blocks(keep=0.01, staleness=50, block=1), Blocks(keep=0.01, staleness=4, block=1)
    memory = Memory.zeros(loose, LayerSpec("x", (100,)))
    for _ in range(10):
        chosen_by(loose, torch.arange(100.0), memory, 0)
    last = [-1] * 100
    for step in range(30):
        chosen = chosen_by(tight, torch.arange(100.0), memory, 0)
        assert len(chosen) == 20
        for b in chosen:
            last[b] = step
    assert all(29 - went <= 4 for went in last)


@pytest.mark.parametrize(
    ("n", "block", "length", "count", "nbytes"), [(0, 8, 1, 0, 0), (5, 8, 5, 1, 28), (80, 8, 8, 2, 80)]
)
def test_bytes_are_those_of_the_blocks_that_go(n: int, block: int, length: int, count: int, nbytes: int) -> None:
    codec, spec = Blocks(keep=0.2, staleness=10, block=block), LayerSpec("x", (n,))
    assert (codec.length(spec), codec.count(spec), codec.nbytes(spec)) == (length, count, nbytes)
