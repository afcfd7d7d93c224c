"""What a lane computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commlib.collective import AllReduce, Rounds, Scope
from commlib.exchange.item import World
from commlib.exchange.sequencer import Sequencer
from fleet import Fleet


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


@pytest.mark.slow
def test_a_lane_multiplies_with_as_many_threads_as_any_other_so_that_bits_do_not_depend_on_when(fleet: Fleet) -> None:
    for mine, lanes in fleet.run(2, products):
        assert torch.equal(mine, lanes)
