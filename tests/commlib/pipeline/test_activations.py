"""Activations and gradients between two real ranks: as they were sent, in order; and who does not come is named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from commlib.errors import PeerLost
from commlib.groups.world import World
from commlib.pipeline.activations import ActivationCarrier
from commlib.pipeline.schedule import place
from tests.support.rank_pool import Fleet


def made(p: int) -> torch.Tensor:
    """Of another shape and dtype for each; some are not contiguous."""
    shape = [(), (3,), (2, 0), (4, 3, 2)][p % 4]
    values = torch.arange(float(torch.Size(shape).numel())).add_(100 * p).view(shape)
    return values.to([torch.float32, torch.bfloat16, torch.float64][p % 3]).t() if len(shape) == 2 else values


def there_and_back(world: World) -> tuple[list[bool], str]:
    carrier = ActivationCarrier(dist.new_group(), place(world.rank, 2, 2), [0, 1], torch.device("cpu"), 4, 120.0)
    found = []
    for p in range(20):
        if world.rank == 0:
            carrier.forward(made(p), p)
            back = carrier.gradient(made(p), p)
            found.append(torch.equal(back, made(p) * 2) and back.dtype == made(p).dtype and not back.requires_grad)
        else:
            x = carrier.input(p)
            found.append(torch.equal(x, made(p)) and x.dtype == made(p).dtype and x.requires_grad and x.is_leaf)
            carrier.backward(x.detach() * 2, p)
    carrier.drain()
    dist.barrier()
    told = ""
    if world.rank == 0:
        with pytest.raises(TypeError, match=r"one tensor of float32, .*; this one is torch\.int64"):
            carrier.forward(torch.ones(2, dtype=torch.int64), 0)
        with pytest.raises(ValueError, match="8 dimensions at most"):
            carrier.forward(torch.ones([1] * 9), 0)
        carrier.timeout = 0.5
        with pytest.raises(PeerLost) as lost:
            carrier.gradient(torch.ones(2), 7)
        told = str(lost.value)
    return found, told


def test_what_is_sent_arrives_as_it_was_and_a_wait_ends_with_whom_it_was_for(fleet: Fleet) -> None:
    (there, told), (back, _) = fleet.run(2, there_and_back)
    assert all(there)
    assert all(back)
    assert told.startswith(
        "stage 1 of virtual worker 0 (rank 1) no longer sends the gradient of minibatch 7, for which stage 0 of "
        "virtual worker 0 (rank 0) waits 0.5 s at most: it is gone"
    )
