"""Every value of a layer's gradient is made by one rank, and all make about as many."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib.exchange.factors.delivery import BlockShares

SHARES = st.builds(BlockShares, n=st.integers(1, 20), m=st.integers(1, 20), size=st.integers(1, 9))


@given(SHARES)
def test_blocks_and_parts_of_the_bias_cover_everything_once_in_rank_order(s: BlockShares) -> None:
    weight, bias = torch.zeros(s.n, s.m), torch.zeros(s.n)
    for rank in range(s.size):
        weight[s.outputs(rank), s.inputs(rank)] += 1 + rank
        bias[s.bias(rank)] += 1 + rank
    for made in (weight, bias):
        assert bool((made >= 1).all())
        assert bool((made <= s.size).all())
    along = weight[:, 0] if s.by_outputs else weight[0]
    assert torch.equal(along, along.sort().values)
    assert torch.equal(bias, bias.sort().values)
    assert float(weight.sum()) == sum((1 + r) * weight[s.outputs(r), s.inputs(r)].numel() for r in range(s.size))


@given(SHARES)
def test_the_larger_dimension_is_cut_as_evenly_as_can_be_and_low_ranks_have_the_larger_blocks(s: BlockShares) -> None:
    heights = [s.outputs(r).stop - s.outputs(r).start for r in range(s.size)]
    widths = [s.inputs(r).stop - s.inputs(r).start for r in range(s.size)]
    cut, whole = (heights, widths) if s.n >= s.m else (widths, heights)
    assert set(whole) == {min(s.n, s.m)}
    assert max(cut) - min(cut) <= 1
    assert cut == sorted(cut, reverse=True)
    assert s.largest == cut[0] * whole[0]


@given(SHARES)
def test_who_has_no_block_has_no_part_of_the_bias(s: BlockShares) -> None:
    for rank in range(s.size):
        if s.outputs(rank).start == s.outputs(rank).stop or s.inputs(rank).start == s.inputs(rank).stop:
            assert s.bias(rank).start == s.bias(rank).stop
