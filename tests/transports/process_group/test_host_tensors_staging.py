"""Tensors that do not lie as a call wants them are read and filled where they are: views of any kind, and a GPU's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commlib.transports.process_group.group import ZmqGroup
from commlib.transports.process_group.host_tensors import HostTensor, joined
from tests.support.thread_groups import each, groups

Make = Callable[[Tensor], Tensor]
"""These values, in a tensor that lies somehow."""
SLEEP = 1_000_000_000
"""Cycles of a GPU, half a second or so."""


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def strided(x: Tensor) -> Tensor:
    return x.repeat_interleave(3, dim=1)[:, ::3]


def conjugate(x: Tensor) -> Tensor:
    return (x + 0j).conj()


def negative(x: Tensor) -> Tensor:
    """PyTorch marks it as such, and leaves what it is of as it is."""
    found = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert found.is_neg()
    return found


def trained(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def on_gpu(x: Tensor) -> Tensor:
    return x.cuda()


def on_gpu_strided(x: Tensor) -> Tensor:
    return strided(x.cuda())


MAKES = [
    transposed,
    strided,
    conjugate,
    negative,
    trained,
    *(pytest.param(m, marks=pytest.mark.gpu) for m in (on_gpu, on_gpu_strided)),
]


def calls(group: ZmqGroup, make: Make) -> list[Tensor]:
    """What each call fills, from values that tell the ranks apart."""
    rank, size = group.rank(), group.size()

    def own(rows: int = 4) -> Tensor:
        return make(torch.arange(6.0 * rows).view(rows, 6) + 100 * rank)

    def room(rows: int = 4) -> Tensor:
        return make(torch.full((rows, 6), -1.0))

    group.allreduce([total := own()]).wait()
    group.allreduce_coalesced(both := [own(), own(2)]).wait()
    to_one = dist.ReduceOptions()
    to_one.rootRank = 1
    group.reduce([reduced := own()], to_one).wait()
    group.reduce_scatter([part := room()], [[own() for _ in range(size)]]).wait()
    group._reduce_scatter_base(segment := room(), own(4 * size)).wait()
    of_one = dist.BroadcastOptions()
    of_one.rootRank = 1
    group.broadcast([told := own()], of_one).wait()
    group.allgather([every := [room() for _ in range(size)]], [own()]).wait()
    group._allgather_base(whole := room(4 * size), own()).wait()
    group.gather([got := [room() for _ in range(size)]] if rank == 0 else [], [own()]).wait()
    scatter = dist.ScatterOptions()
    group.scatter([mine := room()], [[own() for _ in range(size)]] if rank == 0 else [], scatter).wait()
    group.alltoall(exchanged := [room() for _ in range(size)], [own() for _ in range(size)]).wait()
    group.alltoall_base(mixed := room(2 * size), own(2 * size), [], []).wait()
    sent, came = group.send([own()], (rank + 1) % size, 3), room()
    group.recv([came], (rank - 1) % size, 3).wait()
    sent.wait()
    rest = [total, *both, part, segment, told, *every, whole, mine, *exchanged, mixed, came]
    return rest + ([reduced] if rank == 1 else []) + (got if rank == 0 else [])


@pytest.mark.parametrize("make", MAKES)
def test_every_call_reads_and_fills_tensors_where_they_lie(make: Make) -> None:
    with groups(3) as ranks:
        expected = each(ranks, lambda group: calls(group, lambda x: x.clone()))
        found = each(ranks, lambda group: calls(group, make))
    for plain, other in zip(expected, found, strict=True):
        for a, b in zip(plain, other, strict=True):
            assert torch.equal(a, b.cpu().real if b.is_complex() else b.cpu())


def test_what_lies_between_the_values_is_left_alone() -> None:
    whole = torch.zeros(4, 6)
    with groups(2) as ranks:
        each(ranks, lambda group: group.broadcast([whole[:, ::2] if group.rank() else torch.ones(4, 3)]).wait())
    assert torch.equal(whole, torch.tensor([1.0, 0.0]).repeat(4, 3))


def test_a_single_value_may_have_any_stride() -> None:
    wholes = [torch.zeros(4), torch.ones(4)]
    with groups(2) as ranks:
        each(ranks, lambda group: group.allreduce([wholes[group.rank()][1::3]]).wait())
    assert [w.tolist() for w in wholes] == [[0, 1, 0, 0], [1, 1, 1, 1]]


def test_what_lies_right_is_used_as_it_is_and_nothing_is_copied() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert HostTensor(x).values.data_ptr() == joined([x]).values.data_ptr() == x.data_ptr()


def test_one_call_takes_tensors_of_one_dtype() -> None:
    with pytest.raises(ValueError, match=r"of one dtype, got \['torch.float16', 'torch.float32'\]"):
        joined([torch.zeros(2), torch.zeros(2, dtype=torch.float16)])


@pytest.mark.parametrize(
    ("bad", "words"), [(torch.zeros(2).to_sparse(), "dense tensors"), (torch.zeros(2, device="meta"), "got meta")]
)
def test_tensors_that_have_no_such_values_are_refused(bad: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        HostTensor(bad)


# -- on a GPU, whose streams are late ---------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("future", [False, True])
def test_a_call_comes_behind_its_callers_stream_and_before_what_that_does_next(future: bool) -> None:
    def train(group: ZmqGroup) -> list[Tensor]:
        seen = []
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(20):
                x, old = torch.zeros(1 << 20, device="cuda"), torch.full((2 << 20,), -1.0, device="cuda")
                torch.cuda._sleep(SLEEP // 50)
                x += step + group.rank()
                before = old + 0  # behind the sleep: the call must not fill it sooner
                summed = group.allreduce([x])
                gathered = group._allgather_base(old, torch.full((1 << 20,), float(step), device="cuda"))
                for work in (summed, gathered):
                    work.get_future().wait() if future else work.wait()
                seen += [x.mean(), old.mean(), before.mean()]
                x.fill_(-5)  # what the call has read, too, is the caller's again
            torch.cuda.current_stream().synchronize()
        return seen

    with groups(2) as ranks:
        for seen in each(ranks, train):
            assert [t.item() for t in seen] == [v for s in range(20) for v in (2 * s + 1, s, -1)]


@pytest.mark.gpu
def test_a_call_does_not_keep_its_caller_until_the_gpu_is_there() -> None:
    def call(group: ZmqGroup) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(1 << 20, device="cuda")
            group.allreduce([x]).wait()  # streams and pinned memory are there from now on
            torch.cuda.synchronize()
            torch.cuda._sleep(4 * SLEEP)  # seconds, where a call takes a thousandth of one
            there = torch.cuda.Event()
            there.record()
            work = group.allreduce([x])
            kept: bool = there.query()
            work.wait()
            assert x.mean().item() == 4
            return kept

    with groups(2) as ranks:
        assert each(ranks, call) == [False, False]
