"""Replicas that differ are found, on every rank, and named; what is equal costs no more than a sum over its bits."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import commlib
from commlib.errors import PeerLost, PlanMismatch, ReplicasDiverged
from commlib.groups.world import World
from commlib.monitoring.replica_check import Comparison, checksum, compared, differing, explain
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import Trainer, batch, model

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.complex64)


def bits(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def flip(x: Tensor, bit: int) -> None:
    """Of a contiguous tensor, in place."""
    raw = bits(x)
    raw[bit // 8] = int(raw[bit // 8]) ^ (1 << bit % 8)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    raw = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
    st.integers(0, 1000),
    st.integers(0, 10**6),
)
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype, shape: tuple[int, ...], seed: int, bit: int) -> None:
    x = drawn(shape, dtype, seed)
    before = checksum(x).item()
    assert checksum(x.clone()).item() == before
    flip(x, bit % (8 * x.nbytes))
    assert checksum(x).item() != before


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, 3 * (1 << 16) + 5])
def test_a_flipped_bit_is_seen_in_any_block(size: int) -> None:
    x = drawn((size,), torch.float32, 0)
    before = checksum(x).item()
    for bit in (0, 31, 32 * (1 << 16) - 1, 32 * size - 1, 32 * (size // 2) + 31):
        flip(x, bit % (32 * size))
        assert checksum(x).item() != before
        flip(x, bit % (32 * size))
    assert checksum(x).item() == before


def test_where_values_stand_counts_also_across_blocks_and_signs_that_change_in_pairs() -> None:
    n = 1 << 16
    x = drawn((2 * n,), torch.float32, 1)
    before = checksum(x).item()
    for a, b in ((0, 1), (5, n + 5), (1, n), (n - 1, 2 * n - 1)):
        y = x.clone()
        y[[a, b]] = x[[b, a]]
        assert checksum(y).item() != before
        z = x.clone()
        z[[a, b]] = -x[[a, b]]  # both their highest bits: these differ by the same power of two
        assert checksum(z).item() != before


def test_layout_and_where_in_memory_do_not_count_but_the_sign_of_zero_does() -> None:
    x = drawn((4, 6, 3, 3), torch.float32, 2)
    assert checksum(x.to(memory_format=torch.channels_last)).item() == checksum(x).item()
    half = drawn((7,), torch.float16, 3)
    assert checksum(half[1:]).item() == checksum(half[1:].clone()).item()  # not at a 4-byte boundary
    assert checksum(torch.zeros(3)).item() != checksum(torch.tensor([0.0, -0.0, 0.0])).item()
    assert checksum(torch.empty(0)).item() == 0
    assert checksum(torch.tensor([True, False])).item() != checksum(torch.tensor([False, True])).item()


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=5))
def test_ranks_are_put_together_by_what_they_hold(sums: list[list[int]]) -> None:
    found = differing(["a", "b", "c"], [*sums, []])  # the last rank does not take part
    for i, name in enumerate("abc"):
        column = [row[i] for row in sums]
        assert (name in found) == (len(set(column)) > 1)
        if name in found:
            holders = found[name]
            assert sorted(r for ranks in holders for r in ranks) == list(range(len(sums)))
            assert all(len({column[r] for r in ranks}) == 1 for ranks in holders)
            assert len(holders) == len(set(column))
            assert [len(r) for r in holders] == sorted((len(r) for r in holders), reverse=True)


def test_the_error_says_where_who_when_and_what_to_look_at_and_travels() -> None:
    error = explain({"2.weight": [[0, 2, 3], [1]], "2.bias": [[0, 1, 2], [3]]}, 120)
    assert str(error).startswith(
        "after 120 steps replicas differ in '2.weight' (and 1 more: 2.bias): ranks 0, 2, 3 and rank 1 each hold values"
    )
    assert "optimizer" in str(error)
    assert "make DDP anew" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (again.layer, again.layers, again.holders, again.step) == (
        "2.weight",
        ["2.weight", "2.bias"],
        [[0, 2, 3], [1]],
        120,
    )
    assert str(again) == str(error)


def found(world: World, rule: str, every: int, spoilt: int, at: int, style: str) -> dict[str, Any]:
    """Trains until it is found that a bit of 2.weight was flipped on one rank after so many steps."""
    trainer = Trainer(world, rule, style=style, check_replicas=every)
    try:
        trainer.train(at)
        if world.rank == spoilt:
            with torch.no_grad():
                flip(trainer.module[2].weight, 8 * 4 * 1000 + 7)  # type: ignore[arg-type]
        with pytest.raises(ReplicasDiverged) as error:
            trainer.train(3 * every)
    finally:
        trainer.close()
    e = error.value
    return {"layer": e.layer, "holders": e.holders, "step": e.step, "said": str(e), "taken": trainer.step}


@pytest.mark.parametrize(
    ("rule", "style"), [("none", "attach"), ("none", "register"), ("onebit@scatter_gather", "attach")]
)
def test_one_flipped_bit_is_found_at_the_next_comparison_and_every_rank_says_the_same(
    fleet: Fleet, rule: str, style: str
) -> None:
    said = fleet.run(3, found, rule, 4, 1, 5, style)
    assert said[0] == said[1] == said[2]
    assert said[0]["layer"] == "2.weight"
    assert said[0]["holders"] == [[0, 2], [1]]
    assert said[0]["step"] == said[0]["taken"] == 7  # the eighth exchange's comparison; seven steps were taken
    assert "after 7 steps replicas differ in '2.weight'" in said[0]["said"]


def equal(world: World, rule: str) -> tuple[bool, int | None, bool]:
    """Weights with comparisons and without."""
    ends = []
    for every in (3, 0):
        trainer = Trainer(world, rule, check_replicas=every)
        trainer.train(10)
        guard = trainer.comm._monitor.guard
        ends.append((trainer.weights(), guard and guard.checked))
        trainer.close()
    return torch.equal(ends[0][0], ends[1][0]), ends[0][1], ends[1][1] is None


@pytest.mark.parametrize("rule", ["none", "powersgd:rank=2@low_rank", "auto"])
def test_equal_replicas_train_as_without_it_and_0_has_no_guard(fleet: Fleet, rule: str) -> None:
    assert fleet.run(2, equal, rule) == [(True, 8, True)] * 2


def uneven(world: World) -> tuple[int, int | None]:
    """Rank 1 has four batches more than rank 0, which joins early."""
    trainer = Trainer(world, "onebit", check_replicas=2)
    with Join([trainer.ddp]):
        for step in range(4 + 4 * world.rank):
            trainer.optimizer.zero_grad()
            x, y = batch(world, step)
            nn.functional.cross_entropy(trainer.ddp(x), y).backward()
            trainer.optimizer.step()
    checked = trainer.comm._monitor.guard.checked
    trainer.close()
    return trainer.comm.stats().steps, checked


def test_a_rank_that_has_joined_makes_its_part_and_is_not_compared(fleet: Fleet) -> None:
    assert fleet.run(2, uneven) == [(8, 7), (8, 7)]


def disagreeing(world: World) -> str:
    with pytest.raises(PlanMismatch) as error:
        Trainer(world, "onebit", check_replicas=10 + 10 * world.rank)
    return str(error.value)


def test_ranks_that_compare_at_other_times_are_told_so_when_they_attach(fleet: Fleet) -> None:
    for said in fleet.run(2, disagreeing):
        assert "check_replicas" in said
        assert "10" in said
        assert "20" in said


def bad(world: World) -> list[str]:
    said = []
    for value in (-1, 2.5, True):
        with pytest.raises(ValueError, match="check_replicas must be a whole number ≥ 0") as error:
            Trainer(world, "onebit", check_replicas=value)
        said.append(str(error.value))
    return said


def test_a_bad_number_is_refused(fleet: Fleet) -> None:
    assert len(fleet.run(1, bad)[0]) == 3


def by_hand(world: World) -> dict[str, Any]:
    net = model()
    net[4].bias.requires_grad_(False)  # a frozen one counts too
    commlib.check_replicas(net)
    if world.rank == 2:
        with torch.no_grad():
            flip(net[4].bias, 0)  # type: ignore[arg-type]
    with pytest.raises(ReplicasDiverged) as error:
        commlib.check_replicas(net)
    commlib.check_replicas(nn.Identity())  # nothing to compare
    other = nn.Linear(4, 4 + world.rank)
    with pytest.raises(PlanMismatch) as mismatch:
        commlib.check_replicas(other)
    return {"layer": error.value.layer, "holders": error.value.holders, "other": str(mismatch.value)}


def test_by_hand_too_and_other_models_are_an_error_on_every_rank(fleet: Fleet) -> None:
    for said in fleet.run(3, by_hand):
        assert (said["layer"], said["holders"]) == ("4.bias", [[0, 1], [2]])
        assert "weight" in said["other"]


def alone(world: World) -> list[str]:
    said: list[str] = []
    groups = [dist.new_group(timeout=datetime.timedelta(seconds=10)) for _ in range(2)]  # which both make meanwhile
    if world.rank == 0:
        with pytest.raises(PeerLost) as error:
            commlib.check_replicas(model(), timeout=0.5)
        said.append(str(error.value))
    dist.barrier()
    if world.rank == 0:
        net = model()
        for group, meanwhile in zip(groups, (nothing, gone), strict=True):
            with pytest.raises(PeerLost) as error:
                Comparison(group, lambda: compared(net), world, "test/lost").make(3, meanwhile=meanwhile)
            said.append(str(error.value))
    return said


def nothing() -> None:
    pass


def gone() -> None:
    raise PeerLost("as the roll call found")


def test_who_does_not_come_is_named(fleet: Fleet) -> None:
    said = fleet.run(2, alone)[0]
    assert "rank 1" in said[0]
    assert "rank 1 did not answer" in said[1]
    assert said[2] == "as the roll call found"


def test_parts_of_parameters_are_refused() -> None:
    net = nn.Linear(2, 2)
    net.weight.full_tensor = lambda: None  # type: ignore[attr-defined]  # as a DTensor has it
    with pytest.raises(TypeError, match="weight is a DTensor"):
        compared(net)
