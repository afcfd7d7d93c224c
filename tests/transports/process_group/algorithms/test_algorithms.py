"""Each rank's part in a collective, driven for all ranks at once in any order, gives what the collective is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.transports.process_group.algorithms import copy, reduce, sparse
from commlib.transports.process_group.algorithms.steps import Fold, Position, into, to
from tests.support.schedule_driver import drive, values

SIZES = st.integers(1, 5)
LENGTHS = st.integers(0, 40)
PIECES = st.sampled_from([1, 8, 24, 1 << 20])
SEEDS = st.integers(0, 1 << 30)
DTYPES = st.sampled_from([torch.float32, torch.uint8, torch.bfloat16, torch.int64, torch.complex64])
ALL_REDUCES = [reduce.all_reduce, reduce.all_reduce_two_shot, reduce.all_reduce_ring]
SUM = Fold(add=Tensor.add_)


def places(size: int, piece: int) -> list[Position]:
    return [Position(r, size, piece) for r in range(size)]


def at_least(schedule: object, size: int) -> int:
    """A ring has two ranks or more."""
    return max(2, size) if "ring" in schedule.__name__ else size  # type: ignore[attr-defined]


@given(SIZES, LENGTHS, PIECES, DTYPES, SEEDS, st.sampled_from(ALL_REDUCES))
def test_all_reduce_sums_everywhere(size, n, piece, dtype, seed, schedule) -> None:
    size = at_least(schedule, size)
    flats = [values(seed + r, n, dtype) for r in range(size)]
    expected = torch.stack(flats).sum(0).to(dtype) if n else torch.empty(0, dtype=dtype)
    drive([schedule(p, f, SUM) for p, f in zip(places(size, piece), flats, strict=True)], seed)
    for flat in flats:
        assert torch.equal(flat, expected)


@given(st.integers(2, 5), st.integers(1, 60), PIECES, SEEDS)
@pytest.mark.parametrize("schedule", ALL_REDUCES)
def test_replicas_are_equal_to_the_last_bit_and_averages_are_divided_once(schedule, size, n, piece, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    flats = [torch.randn(n, generator=generator) for _ in range(size)]
    expected = torch.stack(flats).mean(0)
    mean = Fold(add=Tensor.add_, end=lambda total: total.div_(size))
    drive([schedule(p, f, mean) for p, f in zip(places(size, piece), flats, strict=True)], seed)
    for flat in flats:
        assert torch.equal(flat, flats[0])
        torch.testing.assert_close(flat, expected)


@given(SIZES, st.lists(st.integers(0, 30), min_size=5, max_size=5), PIECES, SEEDS, st.integers(1, 2))
def test_sparse_tensors_are_summed_whatever_each_has_of_them(size, counts, piece, seed, sparse_dims) -> None:
    generator = torch.Generator().manual_seed(seed)

    def make(count: int) -> Tensor:
        at = torch.randint(0, 6, (sparse_dims, count), generator=generator)
        its = torch.randn(count, *(6, 3)[sparse_dims - 1 :], generator=generator)
        return torch.sparse_coo_tensor(at, its, (6, 6, 3), check_invariants=True).coalesce()

    owns, sums = [make(counts[r]) for r in range(size)], [list[Tensor]() for _ in range(size)]
    drive([sparse.all_reduce(p, o, i) for p, o, i in zip(places(size, piece), owns, sums, strict=True)], seed)
    for (total,) in sums:
        torch.testing.assert_close(total.to_dense(), torch.stack([o.to_dense() for o in owns]).sum(0))
        assert torch.equal(total.indices(), sums[0][0].indices())
        assert torch.equal(total.values(), sums[0][0].values())


@given(SIZES, LENGTHS, PIECES, SEEDS, st.integers(0, 4))
@pytest.mark.parametrize("schedule", [reduce.reduce, reduce.reduce_chain])
def test_reduce_sums_on_the_root_and_leaves_the_others_alone(schedule, size, n, piece, seed, root) -> None:
    root %= size
    flats = [values(seed + r, n, torch.float64) for r in range(size)]
    before = [f.clone() for f in flats]
    drive([schedule(p, f, root, SUM) for p, f in zip(places(size, piece), flats, strict=True)], seed)
    for rank, flat in enumerate(flats):
        assert torch.equal(flat, sum(before, torch.zeros(n)) if rank == root else before[rank])


@given(st.data(), SIZES, PIECES, SEEDS)
@pytest.mark.parametrize("schedule", [reduce.reduce_scatter, reduce.reduce_scatter_ring])
def test_reduce_scatter_gives_each_its_sum_and_keeps_what_was_given(schedule, data, size, piece, seed) -> None:
    size = at_least(schedule, size)
    lengths = data.draw(st.lists(LENGTHS, min_size=size, max_size=size))
    parts = [[values(seed + 7 * r + p, n, torch.int32) for p, n in enumerate(lengths)] for r in range(size)]
    before = [[t.clone() for t in own] for own in parts]
    outs = [torch.empty(n, dtype=torch.int32) for n in lengths]
    drive([schedule(p, outs[p.rank], parts[p.rank], SUM) for p in places(size, piece)], seed)
    for rank, out in enumerate(outs):
        assert torch.equal(out, sum((own[rank] for own in before), torch.zeros_like(out)))
    assert all(torch.equal(a, b) for x, y in zip(parts, before, strict=True) for a, b in zip(x, y, strict=True))


@given(SIZES, LENGTHS, PIECES, DTYPES, SEEDS, st.integers(0, 4))
@pytest.mark.parametrize("schedule", [copy.broadcast, copy.broadcast_chain])
def test_broadcast_gives_all_what_the_root_has(schedule, size, n, piece, dtype, seed, root) -> None:
    root %= size
    flats = [values(seed + r, n, dtype) for r in range(size)]
    expected = flats[root].clone()
    drive([schedule(p, f, root) for p, f in zip(places(size, piece), flats, strict=True)], seed)
    assert all(torch.equal(f, expected) for f in flats)


@given(st.data(), SIZES, PIECES, SEEDS)
@pytest.mark.parametrize("schedule", [copy.all_gather, copy.all_gather_ring])
def test_all_gather_gives_all_everything_whatever_its_lengths(schedule, data, size, piece, seed) -> None:
    size = at_least(schedule, size)
    lengths = data.draw(st.lists(LENGTHS, min_size=size, max_size=size))
    own = [values(seed + r, n, torch.float16) for r, n in enumerate(lengths)]
    outs = [[torch.empty_like(t) for t in own] for _ in range(size)]
    drive([schedule(p, outs[p.rank], own[p.rank]) for p in places(size, piece)], seed)
    assert all(torch.equal(a, b) for each in outs for a, b in zip(each, own, strict=True))


@given(SIZES, LENGTHS, PIECES, SEEDS, st.integers(0, 4))
def test_gather_brings_all_to_the_root_and_scatter_back(size, n, piece, seed, root) -> None:
    root %= size
    own = [values(seed + r, n, torch.float32) for r in range(size)]
    outs = [torch.empty(n) for _ in range(size)]
    drive([copy.gather(p, outs if p.rank == root else [], own[p.rank], root) for p in places(size, piece)], seed)
    assert all(torch.equal(a, b) for a, b in zip(outs, own, strict=True))
    back = [torch.empty(n) for _ in range(size)]
    drive([copy.scatter(p, back[p.rank], outs if p.rank == root else [], root) for p in places(size, piece)], seed)
    assert all(torch.equal(a, b) for a, b in zip(back, own, strict=True))


@given(st.data(), SIZES, PIECES, SEEDS)
def test_all_to_all_of_any_lengths_is_a_transposition(data, size, piece, seed) -> None:
    lengths = [data.draw(st.lists(LENGTHS, min_size=size, max_size=size)) for _ in range(size)]
    parts = [[values(seed + 9 * r + p, n, torch.uint8) for p, n in enumerate(row)] for r, row in enumerate(lengths)]
    outs = [[torch.empty(lengths[p][r], dtype=torch.uint8) for p in range(size)] for r in range(size)]
    drive([copy.all_to_all(p, outs[p.rank], parts[p.rank]) for p in places(size, piece)], seed)
    assert all(torch.equal(outs[r][p], parts[p][r]) for r in range(size) for p in range(size))


def test_the_ring_sends_no_more_than_it_must() -> None:
    n, size, one = 48, 4, 4
    flats = [torch.ones(n) for _ in range(size)]
    messages = drive([reduce.all_reduce_ring(p, f, SUM) for p, f in zip(places(size, one), flats, strict=True)], 0)
    assert messages == size * 2 * (size - 1) * n // size


def test_the_driver_sees_a_schedule_that_overwrites_what_it_sent() -> None:
    def hasty(place: Position, flat: Tensor):
        yield from to(place.right, place, flat)
        flat.zero_()
        yield from into(place.left, place, flat)

    came = []
    for seed in range(20):
        flats = [torch.ones(3), torch.ones(3)]
        drive([hasty(p, f) for p, f in zip(places(2, 1 << 20), flats, strict=True)], seed)
        came += [bool(f.all()) for f in flats]
    assert not all(came)


def test_the_driver_sees_ranks_that_wait_for_each_other() -> None:
    flats = [torch.ones(3), torch.ones(3)]
    both = [into(p.left, p, f) for p, f in zip(places(2, 8), flats, strict=True)]
    with pytest.raises(AssertionError, match="wait for each other"):
        drive(both, 0)
