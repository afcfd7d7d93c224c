"""One layer's rows on their way, all ranks in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.exchange.factors.delivery import BlockShares, BroadcastDelivery, OwnerDelivery, RowDelivery
from commlib.exchange.factors.payload import RowCapacity, RowPayload
from commlib.exchange.factors.rounds import FactorRounds, RowHistory, Way
from commlib.groups.world import World
from tests.support.tiny_ddp import Meeting

N, M = 4, 7  # an odd number of values in a row
CPU = torch.device("cpu")


def to_all(world: World) -> RowDelivery:
    return BroadcastDelivery(RowPayload(N, M), world)


def to_owners(world: World) -> RowDelivery:
    return OwnerDelivery(N, M, world)


@dataclasses.dataclass
class Step:
    """What every rank has: rows in one or more calls, and whether there is gradient besides."""

    calls: list[list[int]]
    dirty: list[bool]
    half: bool


STEP = st.integers(1, 4).flatmap(
    lambda size: st.lists(
        st.builds(
            Step,
            calls=st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=size, max_size=size),
            dirty=st.lists(st.booleans(), min_size=size, max_size=size),
            half=st.booleans(),
        ),
        min_size=1,
        max_size=4,
    )
)


def rows(k: int, gen: torch.Generator, half: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.bfloat16 if half else torch.float32
    return torch.randn(k, M, generator=gen).to(dtype), torch.randn(k, N, generator=gen).to(dtype)


def heard(trips: Sequence[FactorRounds]) -> list[Way]:
    """How each rank goes on, by the words of all."""
    words = [trip.word() for trip in trips]
    return [trip.way(words) for trip in trips]


def part(to: Callable[[World], RowDelivery], rank: int, size: int) -> tuple[slice, slice]:
    """Columns of U and V that a rank gets."""
    shares = BlockShares(N, M, size)
    return (slice(None), slice(None)) if to is to_all else (shares.inputs(rank), shares.outputs(rank))


@pytest.mark.parametrize("to", [to_all, to_owners])
@given(STEP)
def test_ranks_get_the_rows_they_multiply_or_know_that_the_matrices_must_be_summed(
    to: Callable[[World], RowDelivery], steps: list[Step]
) -> None:
    size = len(steps[0].calls)
    gen = torch.Generator().manual_seed(0)
    habits = [RowHistory() for _ in range(size)]
    for step in steps:
        group = Meeting(size)
        trips = [FactorRounds(to(World(r, size)), habit, CPU) for r, habit in enumerate(habits)]
        had = [[rows(k, gen, step.half) for k in calls] for calls in step.calls]
        for trip, mine, dirty in zip(trips, had, step.dirty, strict=True):
            trip.load(mine, dirty)
            trip.start(group)
        for trip in trips:
            trip.wait()
        ways = set(heard(trips))
        assert len(ways) == 1
        way = ways.pop()
        if any(step.dirty):
            assert way == "summed"
        if way == "again":
            again = {trip.again(group) for trip in trips}
            assert len(again) == 1 or to is to_owners  # who owns more sends less
            assert min(again) > 0 or size == 1
            assert all(trip.again(group) == 0.0 for trip in trips)  # the layer's other parameter finds it started
        if way == "summed":
            for trip, mine in zip(trips, had, strict=True):
                own = trip.own()
                assert (own is None) == (not mine)
                if own is not None:
                    assert torch.equal(own[0], torch.cat([u for u, _ in mine]).float())
        else:
            everyone = [trip.everyone() for trip in trips]
            everything = [r for mine in had for r in mine]
            us = torch.cat([u for u, _ in everything]) if everything else torch.empty(0, M)
            vs = torch.cat([v for _, v in everything]) if everything else torch.empty(0, N)
            for rank, (u, v) in enumerate(everyone):
                inputs, outputs = part(to, rank, size)
                assert torch.equal(u, us.float()[:, inputs])
                assert torch.equal(v, vs.float()[:, outputs] / size)
        assert len({(h.room.rows, h.room.dtype) for h in habits}) == 1  # so the next payloads are alike


def test_room_is_what_was_needed_lately_and_is_given_up_after_twenty_steps() -> None:
    habit = RowHistory()
    assert habit.room == RowCapacity(0)
    for needed in (4, 9, 4):
        habit.saw(needed, torch.float32)
    assert habit.room.rows == 9
    for _ in range(19):
        habit.saw(4, torch.float32)
    assert habit.room.rows == 4


def test_a_trip_that_never_starts_says_so() -> None:
    trip = FactorRounds(to_all(World(0, 2)), RowHistory(), CPU)
    trip.give_up("the backward pass broke off")
    with pytest.raises(Exception, match="broke off"):
        trip.wait()


def test_rows_of_an_odd_dtype_are_refused() -> None:
    trip = FactorRounds(to_all(World(0, 1)), RowHistory(), CPU)
    odd = torch.zeros(1, M, dtype=torch.complex64), torch.zeros(1, N, dtype=torch.complex64)
    with pytest.raises(TypeError, match="complex64"):
        trip.load([odd], False)


def started(
    calls: list[int], habits: list[RowHistory], dirty: bool = False
) -> tuple[list[FactorRounds], list[tuple[Tensor, Tensor]]]:
    """A step of so many rows on each rank, after its first round; and these rows. The last rank may be dirty."""
    size, gen = len(calls), torch.Generator().manual_seed(0)
    group, had = Meeting(size), [rows(k, gen, False) for k in calls]
    trips = [FactorRounds(to_all(World(r, size)), habit, CPU) for r, habit in enumerate(habits)]
    for trip, mine in zip(trips, had, strict=True):
        trip.load([mine], dirty and trip is trips[-1])
        trip.start(group)
    return trips, had


@pytest.mark.parametrize(("k", "way"), [(1, "again"), (8, "summed")])
def test_rows_go_again_only_while_that_takes_fewer_bytes_than_the_matrices(k: int, way: str) -> None:
    """4·(N + M) bytes a row, and 4·N·M of the matrices."""
    trips, _ = started([k, k], [RowHistory(), RowHistory()])
    assert heard(trips) == [way] * 2


def test_rows_that_just_fill_the_room_arrive_in_the_first_round() -> None:
    habits = [RowHistory(), RowHistory()]
    for habit in habits:
        habit.expect(3)
    trips, had = started([3, 1], habits)
    assert heard(trips) == ["gathered"] * 2
    for trip in trips:
        u, v = trip.everyone()
        assert torch.equal(u, torch.cat([u for u, _ in had]))
        assert torch.equal(v, torch.cat([v for _, v in had]) / 2)


def test_gradient_besides_the_rows_has_the_matrices_summed_though_all_rows_have_come() -> None:
    habits = [RowHistory(), RowHistory()]
    for habit in habits:
        habit.expect(3)
    trips, _ = started([3, 3], habits, dirty=True)
    assert heard(trips) == ["summed"] * 2
