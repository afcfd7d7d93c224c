"""What a lane computes, and what the thread that asks waits for itself."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlib.exchange.collectives import AllReduce, Rounds, Scope
from commlib.exchange.sequencer import Sequencer
from commlib.groups.world import World
from commlib.telemetry.stats import Meter
from tests.support.rank_pool import Fleet
from tests.support.tiny_ddp import heard, say


def products(world: World) -> list[Tensor]:
    """The same product, by a lane that has computed nothing yet and by the thread that has set how many threads."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(8, 48, generator=generator), torch.randn(8, 5, generator=generator)
    found = [v.t() @ u]

    def rounds() -> Rounds:
        yield [AllReduce(torch.zeros(1))]
        found.append(v.t() @ u)

    groups: list[dict[Scope, Any]] = [{"world": dist.group.WORLD}]
    sequencer = Sequencer(groups, lambda what, error: error, inline=False)
    sequencer.submit("a bucket", rounds(), u).wait()
    sequencer.close()
    return found


def test_a_lane_multiplies_with_as_many_threads_as_any_other_so_that_bits_do_not_depend_on_when(fleet: Fleet) -> None:
    for mine, lanes in fleet.run(2, products):
        assert torch.equal(mine, lanes)


EVERY, LOOKS = 0.05, 5
CPU = torch.device("cpu")


def waited(world: World) -> tuple[float, list[float], float]:
    """Two sums to which rank 0 comes once rank 1 has looked around for it so often; the results, when, and seconds."""
    groups: list[dict[Scope, Any]] = [{"world": dist.group.WORLD}]
    sequencer, values = Sequencer(groups, lambda what, error: error, inline=False), torch.ones(2).split(1)
    looks, meter = list[float](), Meter(CPU, "a")

    def look() -> None:
        looks.append(time.monotonic())
        if world.rank == 1 and len(looks) == LOOKS:
            say("rank 1 has looked around")

    if world.rank == 0:
        heard("rank 1 has looked around")
    group: Any = dist.group.WORLD
    future = sequencer.join("sums", [group.allreduce([value]) for value in values], meter, look, every=EVERY)
    assert future.done()
    future.wait()
    sequencer.close()
    return float(sum(values)), looks, meter.seconds()["wire"]


def test_whoever_waits_here_looks_around_meanwhile_and_gets_the_sum(fleet: Fleet) -> None:
    (value, _, _), (same, looks, seconds) = fleet.run(2, waited)
    assert value == same == 4.0
    assert seconds >= looks[-1] - looks[0]  # all of it was waiting
    assert len(looks) >= LOOKS
    assert all(b - a > 0.9 * EVERY for a, b in itertools.pairwise(looks))


def gives_up(world: World) -> tuple[bool, bool]:
    """Two lose patience with a third, which comes once they have, and nothing is issued after that."""
    own: Any = dist.new_group()
    groups: list[dict[Scope, Any]] = [{"world": own}]
    if world.rank == 2:
        for rank in (0, 1):
            heard(f"rank {rank} has given up")
        own.allreduce([torch.ones(1)]).wait()
        return True, True
    sequencer = Sequencer(groups, lambda what, error: error, inline=False)

    def look() -> None:
        raise sequencer.give_up(KeyError("nobody comes"))

    work = own.allreduce([torch.ones(1)])
    futures = [sequencer.join(what, [work], Meter(CPU, "a"), look, every=0.1) for what in "ab"]
    sequencer.close()
    say(f"rank {world.rank} has given up")
    found = [isinstance(_error(f), KeyError) for f in futures]
    return found[0], found[1]


def _error(future: torch.futures.Future[Tensor]) -> BaseException | None:
    try:
        future.wait()
    except Exception as e:
        return e
    return None


def test_what_looking_around_has_found_is_the_error_of_that_bucket_and_of_all_later_ones(fleet: Fleet) -> None:
    assert fleet.run(3, gives_up) == [(True, True)] * 3


class Alone:
    """A process group of one rank, where a sum is there at once; notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def size(self) -> int:
        return 1

    def allreduce(self, tensors: list[Tensor]) -> Alone:
        self.asked.append(float(tensors[0]))
        return self

    def wait(self) -> bool:
        return True


def driven(groups: list[Alone]) -> Sequencer:
    return Sequencer([{"world": group} for group in groups], lambda what, error: error, inline=False)


def test_every_round_goes_over_the_group_of_that_round_and_buckets_in_order_in_each() -> None:
    groups = [Alone(), Alone(), Alone()]

    def rounds(bucket: int) -> Rounds:
        for round_ in range(3):
            yield [AllReduce(torch.tensor([10.0 * bucket + round_]))]

    sequencer = driven(groups)
    futures = [sequencer.submit(f"bucket {b}", rounds(b), torch.zeros(1)) for b in range(4)]
    for future in futures:
        future.wait()
    sequencer.close()
    assert [group.asked for group in groups] == [[10.0 * b + r for b in range(4)] for r in range(3)]


def test_the_first_reason_to_give_up_stays_the_one() -> None:
    sequencer, first, second = driven([Alone()]), KeyError("first"), KeyError("second")
    assert sequencer.failed is None
    assert sequencer.give_up(first) is first
    assert sequencer.give_up(second) is first
    assert sequencer.failed is first


def test_after_giving_up_no_bucket_is_issued_by_any_way() -> None:
    group = Alone()
    sequencer, value = driven([group]), torch.ones(1)
    sequencer.give_up(KeyError("nobody comes"))
    futures = [
        sequencer.submit("a", iter([[AllReduce(value)]]), value),
        sequencer.single("b", AllReduce(value), value),
        sequencer.join("c", [], Meter(CPU, "c"), lambda: None),
    ]
    assert [str(_error(f)) for f in futures] == ["'nobody comes'"] * 3
    assert group.asked == []
    sequencer.close()
