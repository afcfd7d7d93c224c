"""A flat tensor in blocks: taken out, put back, and measured."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.codecs import cooperative
from commlib.codecs.cooperative import clear, poison, spread


def magnitudes(flat: Tensor, block: int) -> Tensor:
    out = torch.full((-(-len(flat) // block),), math.nan)
    cooperative.magnitudes(flat, block, out)
    return out


def take(flat: Tensor, block: int, chosen: Tensor) -> Tensor:
    out = torch.full((len(chosen), block), math.nan)
    cooperative.take(flat, block, chosen, out)
    return out


@given(st.integers(0, 60), st.integers(1, 20), st.randoms(use_true_random=False))
def test_what_is_taken_and_put_back_is_what_was_there(n, block, dice):
    flat = torch.arange(1.0, n + 1)
    count = -(-n // block)
    chosen = torch.tensor(sorted(dice.sample(range(count), dice.randint(0, count))), dtype=torch.int64)
    taken = take(flat, block, chosen)
    assert taken.shape == (len(chosen), block)
    rest, back = flat.clone(), torch.full((n,), math.nan)
    clear(rest, block, chosen)
    spread(taken, back, block, chosen)
    assert torch.equal(rest + back, flat)
    assert not (rest * back).any()
    assert taken.sum() == back.sum()  # the short block is filled up with zeros


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 99))
def test_a_magnitude_is_the_root_mean_square_of_its_block(n, block, seed):
    flat = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    wanted = [p.double().square().mean().sqrt().item() for p in flat.split(block)]
    assert magnitudes(flat, block).tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("largest", [1e20, 3.4e38, torch.finfo(torch.float32).max])
def test_finite_values_have_finite_magnitudes_however_large(largest: float) -> None:
    flat = torch.tensor([largest, -largest, largest, 1.0, 0.0, 0.0, largest])
    found = magnitudes(flat, 3)
    assert found.isfinite().all()
    assert found.tolist() == pytest.approx([largest, 1 / math.sqrt(3), largest], rel=1e-5)
    assert poison(found) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4, 6])
def test_a_value_that_is_not_finite_shows_in_its_magnitude_and_poisons(bad: float, place: int) -> None:
    flat = torch.full((7,), 1e30)
    flat[place] = bad
    found = magnitudes(flat, 3)
    assert found.isfinite().tolist() == [i != place // 3 for i in range(3)]
    assert poison(found).isnan()


def test_of_nothing_there_are_no_blocks() -> None:
    assert magnitudes(torch.empty(0), 4).shape == (0,)
    assert poison(torch.empty(0)) == 0
    assert take(torch.empty(0), 4, torch.empty(0, dtype=torch.int64)).shape == (0, 4)
