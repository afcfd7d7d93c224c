"""What is measured on purpose, over real process groups."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from commlib.exchange.item import World
from commlib.link import Link
from commlib.manager.probe import measure_link, measure_product
from fleet import Fleet

CPU = torch.device("cpu")


def link_of(world: World) -> Link:
    return measure_link(dist.group.WORLD, world, CPU)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_see_the_same_link_on_which_bytes_take_time(fleet: Fleet, size: int) -> None:
    links = fleet.run(size, link_of)
    assert links == [links[0]] * size
    assert links[0].world == size
    for line in (links[0].all_reduce, links[0].all_gather):
        assert line.alpha >= 0
        assert line.beta >= 0
        assert 0 < line.seconds(8 << 20) < math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_takes_some_time(dtype: torch.dtype) -> None:
    assert 0 < measure_product(64, 48, 8, dtype, CPU) < 60


def test_the_product_of_no_rows_takes_none() -> None:
    assert measure_product(64, 48, 0, torch.float32, CPU) == 0
