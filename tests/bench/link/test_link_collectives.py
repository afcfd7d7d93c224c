"""Every operation moves what it says, between real ranks, and one that does not is found out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from commlib.bench.link.collectives import OPS, Buffers, sample, wrong
from commlib.bench.link.worker import Bench, LinkMeasured
from commlib.errors import CommlibError
from commlib.groups.world import World
from tests.support.rank_pool import Fleet, RankFailed

CPU = torch.device("cpu")


def check_all(world: World) -> list[str | None]:
    found = []
    for op in OPS.values():
        for values in (world.size, 64 * world.size, 5000 * world.size):
            buffers = op.prepare(values, world.size, world.rank, CPU, dist.group.WORLD)
            found.append(wrong(op, buffers, values, world.size, world.rank))
    return found


def lose_the_result(world: World) -> str | None:
    op, values = OPS["all_gather"], 4 * world.size
    real = op.prepare(values, world.size, world.rank, CPU, dist.group.WORLD)
    return wrong(op, Buffers(real.source, real.target, lambda: None), values, world.size, world.rank)


def measure_one_that_lies(world: World) -> None:
    lying = OPS["broadcast"]
    if world.rank == 1:
        lying = type(lying)(lying.name, lying.factor, lying.prepare, lambda n, ranks, rank: torch.zeros(n))
    Bench("gloo", dist.group.WORLD).measure(lying, [1000], 1.0, LinkMeasured(None, [], {}, {}), done=0)


def refuse(world: World) -> dict[tuple[str, str], str]:
    def prepare(*_: object) -> Buffers:
        raise RuntimeError("this backend has no such thing\nwith details")

    measured = LinkMeasured(None, [], {}, {})
    op = OPS["gather"]
    refused = type(op)(op.name, op.factor, prepare, op.expected)
    Bench("gloo", dist.group.WORLD).measure(refused, [1000], 1.0, measured, done=0)
    assert not measured.points
    return measured.cannot


def with_little_time(world: World) -> LinkMeasured:
    measured = LinkMeasured(None, [], {}, {})
    bench = Bench("gloo", dist.group.WORLD)
    bench.measure(OPS["all_reduce"], [1000, 4000, 256_000_000], 0.05, measured, done=0)
    return measured


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_moves_is_right(fleet: Fleet, ranks: int) -> None:
    for found in fleet.run(ranks, check_all):
        assert found == [None] * (3 * len(OPS))


def test_what_does_not_move_is_found_out(fleet: Fleet) -> None:
    for found in fleet.run(2, lose_the_result):
        assert found is not None
        assert "all_gather of 8 values: value" in found


def test_wrong_values_on_one_rank_stop_all(fleet: Fleet) -> None:
    with pytest.raises(RankFailed) as e:
        fleet.run(2, measure_one_that_lies)
    assert "rank 0" in str(e.value)
    assert "rank 1" in str(e.value)
    assert "backend gloo gave wrong values: broadcast of 128 values" in str(e.value)
    assert CommlibError.__name__ in str(e.value)


def test_what_a_backend_refuses_is_noted_without_its_details(fleet: Fleet) -> None:
    assert fleet.run(2, refuse) == [{("gloo", "gather"): "this backend has no such thing"}] * 2


def test_all_ranks_leave_the_same_sizes_out(fleet: Fleet) -> None:
    first, second = fleet.run(2, with_little_time)
    assert first == second
    assert first.left_out == {("gloo", "all_reduce"): (256_000_000,)} or first.left_out == {
        ("gloo", "all_reduce"): (4000, 256_000_000)  # on a machine that was very busy
    }
    assert all(3 <= len(p.seconds) <= 50 for p in first.points)


def test_every_rank_and_place_has_its_own_value() -> None:
    a, b = sample(0, 60), sample(1, 60)
    assert len(set(a.tolist())) == 60
    assert not (a == b).any()


def test_bus_bytes_follow_nccl_tests() -> None:
    factors = {name: op.factor(4) for name, op in OPS.items()}
    assert factors == {
        "all_reduce": 1.5,
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 0.75),
        **dict.fromkeys(("broadcast", "reduce", "send_recv"), 1.0),
        "barrier": 0.0,
    }
