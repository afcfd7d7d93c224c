"""Every dtype that PyTorch has on the CPU travels, and adds up where it can."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from commlib.messaging.frame import from_buffer
from commlib.transports.process_group.group import ZmqGroup
from tests.support.thread_groups import each, groups

ADDED = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
CARRIED = [*ADDED, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def values(rank: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(5) + rank).to(dtype)


def test_all_gather_carries_every_dtype() -> None:
    def call(group: ZmqGroup) -> None:
        for dtype in CARRIED:
            outs = [values(9, dtype) for _ in range(3)]
            group.allgather([outs], [values(group.rank(), dtype)]).wait()
            for p, out in enumerate(outs):
                assert torch.equal(out.view(torch.uint8), values(p, dtype).view(torch.uint8)), dtype

    with groups(3) as ranks:
        each(ranks, call)


def test_all_reduce_adds_every_dtype_that_can_be_added() -> None:
    def call(group: ZmqGroup) -> None:
        for dtype in ADDED:
            group.allreduce([x := values(group.rank(), dtype)]).wait()
            assert torch.equal(x, values(0, dtype) + values(1, dtype) + values(2, dtype)), dtype

    with groups(3) as ranks:
        each(ranks, call)


@pytest.mark.parametrize("offset", range(17))
def test_values_may_come_at_any_address(offset: int) -> None:
    for dtype in CARRIED:
        sent = values(2, dtype)
        room = torch.zeros(200, dtype=torch.uint8)
        room[offset : offset + sent.nbytes] = sent.view(torch.uint8)
        found = from_buffer(memoryview(room.numpy())[offset : offset + sent.nbytes], dtype)  # type: ignore[arg-type]
        assert found.data_ptr() % found.itemsize == 0
        assert torch.equal(found.view(torch.uint8), sent.view(torch.uint8))
