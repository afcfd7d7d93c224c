"""What is measured on purpose, over real process groups."""

from __future__ import annotations

import math
import os
import time

import pytest
import torch
import torch.distributed as dist

from commlib.exchange.hierarchy import Hierarchy
from commlib.exchange.rate_limit import RateLimit
from commlib.exchange.throttled_group import Throttle
from commlib.groups.process_groups import sibling
from commlib.groups.world import World
from commlib.messaging.link_model import Link
from commlib.planning.manager.link_probe import LinkProbe, measure_product
from tests.support.rank_pool import Fleet

CPU = torch.device("cpu")


def link_of(world: World) -> Link:
    return LinkProbe(dist.group.WORLD, world, CPU).link()


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_see_the_same_link_on_which_bytes_take_time(fleet: Fleet, size: int) -> None:
    links = fleet.run(size, link_of)
    assert links == [links[0]] * size
    assert links[0].world == size
    assert links[0].drag < 100
    for line in (links[0].all_reduce, links[0].all_gather):
        assert line.alpha >= 0
        assert line.beta >= 0
        assert 0 < line.seconds(8 << 20) < math.inf


def burns() -> None:
    """A transfer that needs the core on which products are computed."""
    end = time.monotonic() + 0.06
    while time.monotonic() < end:
        pass


def drags(world: World) -> tuple[float, float]:
    cores, probe = os.sched_getaffinity(0), LinkProbe(dist.group.WORLD, world, CPU)
    os.sched_setaffinity(0, {min(cores)})
    try:
        return probe._drag(lambda: time.sleep(0.06)), probe._drag(burns)
    finally:
        os.sched_setaffinity(0, cores)  # this process goes on to other tests


@pytest.mark.alone
def test_a_transfer_that_takes_of_the_cores_has_a_drag(fleet: Fleet) -> None:
    ((waits, burns),) = fleet.run(1, drags)
    assert 1 <= waits < 1.5 < burns


def fails() -> None:
    raise ValueError("a rank is gone")


def drag_of_none(world: World) -> str:
    try:
        LinkProbe(dist.group.WORLD, world, CPU)._drag(fails)
    except ValueError as e:
        return str(e)
    return ""


def test_a_transfer_that_fails_beside_products_is_no_drag(fleet: Fleet) -> None:
    assert fleet.run(1, drag_of_none) == ["a rank is gone"]


LIMIT = RateLimit(20, burst=100_000)


class Counting(Throttle):
    """What has left."""

    nbytes = 0.0

    def take(self, nbytes: float) -> float:
        self.nbytes += nbytes
        return super().take(nbytes)


def limited(world: World) -> tuple[Link, float, float]:
    throttle = Counting(LIMIT, 1)
    start = time.monotonic()
    link = LinkProbe(throttle.through(sibling(dist.group.WORLD, CPU)), world, CPU, LIMIT).link()
    throttle.close()
    return link, time.monotonic() - start, throttle.nbytes


def test_under_a_limit_the_probe_keeps_it_and_no_price_is_below_it(fleet: Fleet) -> None:
    for link, seconds, sent in fleet.run(2, limited):
        for line in (link.all_reduce, link.all_gather):
            assert line.seconds(8 << 20) >= LIMIT.seconds(8 << 20)
        assert LIMIT.seconds(sent - LIMIT.at_once) <= seconds
        assert 2 * 3 * (16 << 10) < sent < 8 << 20  # 8 MiB would take more than three seconds at this rate: left out


def two_levels(world: World, limit: RateLimit | None) -> Link:
    levels = Hierarchy(((0, 1), (2, 3)), world.rank)
    throttle = Throttle(limit, 2)
    local, inter = (sibling(dist.group.WORLD, CPU, some) for some in (levels.local_ranks, levels.counterparts))
    whole = throttle.through(sibling(dist.group.WORLD, CPU))
    link = LinkProbe(whole, world, CPU, limit, levels, {"local": local, "inter": throttle.through(inter)}).link()
    throttle.close()
    return link


@pytest.mark.full
def test_under_a_hierarchy_the_dense_line_is_that_of_two_levels_of_which_a_limit_holds_up_what_leaves_a_node(
    fleet: Fleet,
) -> None:
    links = fleet.run(4, two_levels, None)
    assert links == [links[0]] * 4
    assert links[0].world == 4
    assert 0 < links[0].all_reduce.seconds(8 << 20) < math.inf
    limit = RateLimit(100, burst=100_000)
    for link in fleet.run(4, two_levels, limit):
        assert link.all_gather.seconds(8 << 20) >= limit.seconds(8 << 20)
        assert link.all_reduce.seconds(9 << 20) >= limit.seconds(3 << 20)  # of 3/2 of a gradient 1/2 leaves the node


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_takes_some_time(dtype: torch.dtype) -> None:
    assert 0 < measure_product(64, 48, 8, dtype, CPU) < 60


def test_the_product_of_no_rows_takes_none() -> None:
    assert measure_product(64, 48, 0, torch.float32, CPU) == 0
