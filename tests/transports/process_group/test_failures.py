"""Whatever goes wrong between the ranks of a zmq group is an error that says who and what, in time."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import random
import re
import threading
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlib.errors import PeerLost, ProtocolError
from commlib.groups.store import DeadlineStore
from commlib.groups.world import World
from commlib.transports.options import Options
from commlib.transports.process_group import rendezvous
from commlib.transports.process_group.group import ZmqGroup
from commlib.transports.zeromq import ZeroMQ
from tests.support.thread_groups import each, groups, new_store, said, set_deadline

ENDLESS_S = 600.0
"""A deadline that no test waits for: pytest's own is shorter."""


def most() -> Any:
    return types.SimpleNamespace(reduceOp=dist.ReduceOp.MAX)


def ones(n: int = 8) -> torch.Tensor:
    return torch.ones(n)


def test_ranks_that_call_different_collectives_are_told_which() -> None:
    with groups(2) as (a, b):

        def call(group: ZmqGroup) -> str:
            if group is a:
                return said(lambda: group.allreduce([ones()]).wait())
            outs = [ones(), ones()]
            return said(lambda: group.allgather([outs], [ones()]).wait())

        words = each([a, b], call)
    assert any(w.startswith("ProtocolError") for w in words)
    for w in words:
        assert "all_reduce(8 × float32, sum)" in w
        assert "all_gather(16 × float32)" in w
        assert "call 1" in w


@pytest.mark.parametrize("lengths", [(8, 9), (8, 0)])
def test_tensors_of_different_sizes_are_named(lengths: tuple[int, int]) -> None:
    with groups(2) as (a, b):
        set_deadline([a, b], 1)
        words = each([(a, lengths[0]), (b, lengths[1])], lambda g: said(lambda: g[0].allreduce([ones(g[1])]).wait()))
    assert any(f"all_reduce({n} × float32, sum)" in words[0] for n in lengths)
    assert words[0] != "no error"


def test_sparse_tensors_of_different_shapes_are_named() -> None:
    with groups(2) as (a, b):
        words = each([(a, 8), (b, 9)], lambda g: said(lambda: g[0].allreduce([ones(g[1]).to_sparse()]).wait()))
    assert any(f"all_reduce(sparse ({n},), float32, sum)" in words[0] for n in (8, 9))


def test_a_rank_that_does_not_come_is_named_with_the_call_by_all_others() -> None:
    with groups(3, seconds=ENDLESS_S) as ranks:
        set_deadline(ranks[:2], 1)
        words = each(ranks[:2], lambda g: said(lambda: g.allreduce([ones()]).wait()))
        for w in words:
            assert w.startswith("PeerLost")
            assert "all_reduce(8 × float32, sum), 1 s" in w
            assert "rank 2 did not answer a roll call" in w
        assert "rank 2" in said(lambda: ranks[0].barrier().wait())  # and of no more use
        ranks[2].allreduce([late := ones()]).wait()
        assert late.eq(3).all()  # the others' parts had come
        assert "gave up" in said(lambda: ranks[2].barrier().wait())


def test_a_call_may_have_a_deadline_of_its_own() -> None:
    options: Any = dist.BroadcastOptions()
    options.rootRank, options.timeout = 1, datetime.timedelta(seconds=0.3)
    with groups(2, seconds=ENDLESS_S) as (a, _):
        words = said(lambda: a.broadcast([ones()], options).wait())
        assert "broadcast(8 × float32, of rank 1), 0.3 s" in words


def test_who_gives_up_waiting_leaves_the_call_alone() -> None:
    with groups(2) as (a, b):
        work = a.allreduce([mine := ones()])
        with pytest.raises(RuntimeError, match=r"was not through within 0\.2 s; it goes on"):
            work.wait(datetime.timedelta(seconds=0.2))
        assert not work.is_completed()
        b.allreduce([ones()]).wait()
        assert work.wait()
        assert mine.eq(2).all()
        assert work.is_success()
        assert work.exception() is None


def test_a_rank_that_dies_in_the_middle_is_named_before_the_deadline() -> None:
    with groups(3, seconds=ENDLESS_S) as ranks:
        threading.Timer(0.3, ranks[2].shutdown).start()
        words = each(ranks[:2], lambda g: said(lambda: g.allreduce([ones()]).wait()))
        assert any("rank 2 has said goodbye" in w for w in words)
        assert all("rank 2 did not answer a roll call" in w for w in words)


def test_a_rank_that_is_still_telling_the_others_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    through = threading.Event()
    with groups(3, seconds=ENDLESS_S) as ranks:
        slow: Any = ranks[0]._engine._endpoint
        abort = slow.abort
        monkeypatch.setattr(slow, "abort", lambda why: (through.wait(60), abort(why)))
        threading.Timer(0.3, ranks[2].shutdown).start()

        def call(group: ZmqGroup) -> str:
            words = said(lambda: group.allreduce([ones()]).wait())
            through.set()
            return words

        assert "; rank 2 did not answer a roll call" in each(ranks[:2], call)[1]


def test_a_monitored_barrier_names_who_does_not_come() -> None:
    with groups(3) as ranks:
        each(ranks, lambda g: g.monitored_barrier())
        words = each(ranks[:2], lambda g: said(lambda: g.monitored_barrier(datetime.timedelta(seconds=0.3), True)))
        for w in words:
            assert "nothing came from rank 2" in w
            # on a busy machine another one may not answer in a part of 0.3 s
            assert re.search(r"barrier\(\), 0\.3 s; ranks? (?:[01], )?2 did not answer a roll call", w)


def test_a_destroyed_group_says_so_to_those_who_wait_and_who_come() -> None:
    with groups(2) as (a, _):
        work = a.allreduce([ones()])
        threading.Timer(0.2, a.shutdown).start()
        assert "was destroyed" in said(work.wait)
        assert "was destroyed" in said(lambda: a.barrier().wait())
        assert "was destroyed" in said(lambda: a.send([ones()], 1, 0).wait())


def test_a_future_ends_as_the_work_does_whenever_it_is_asked_for() -> None:
    with groups(2) as (a, b):
        works = [g.allreduce([ones()]) for g in (a, b)]
        early = works[0].get_future()
        assert early.wait()[0].eq(2).all()
        assert works[0].get_future() is early
        works[1].wait()
        assert works[1].get_future().wait()[0].eq(2).all()
        set_deadline([a], 0.5)
        lost = a.allreduce([ones()])
        future = lost.get_future()
        with pytest.raises(PeerLost, match="rank 1 did not answer"):
            lost.wait()
        with pytest.raises(RuntimeError, match="rank 1 did not answer"):
            future.wait()


def test_a_message_of_another_size_is_named_and_the_group_goes_on() -> None:
    with groups(2) as (a, b):
        a.send([ones(3)], 1, 7)
        with pytest.raises(ProtocolError, match=r"recv\(4 × .*, of rank 0, tag 7\): rank 0 sent 12 bytes"):
            b.recv([ones(4)], 0, 7).wait()
        each([a, b], lambda g: g.barrier().wait())


def test_a_message_that_does_not_come_is_named_and_the_group_goes_on() -> None:
    with groups(2) as (a, b):
        set_deadline([a], 0.5)
        with pytest.raises(PeerLost, match=r"recv\(8 × torch.float32, of rank 1, tag 3\) at rank 0: nothing came"):
            a.recv([ones()], 1, 3).wait()
        assert "has not told rank 0 where it is" in said(lambda: a.send([ones()], 1, 0).wait())
        set_deadline([a], 60)
        each([a, b], lambda g: g.barrier().wait())


def test_who_waits_for_a_message_of_a_rank_that_left_is_told() -> None:
    with groups(2, seconds=ENDLESS_S) as (a, b):
        sent = b.send([ones()], 0, 0)
        a.recv([ones()], 1, 0).wait()
        sent.wait()
        waiting = a.recv([ones()], 1, 0)
        b.shutdown()
        assert "rank 1 has said goodbye" in said(waiting.wait)
        assert "rank 1 has said goodbye" in said(lambda: a.recv([ones()], 1, 0).wait())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.allreduce([ones(), ones()]), "takes one tensor"),
        (lambda g: g.broadcast([ones().to_sparse()]), "carries dense tensors"),
        (
            lambda g: g.allreduce([ones().to_sparse()], types.SimpleNamespace(reduceOp=dist.ReduceOp.MAX)),
            "no maximum of",
        ),
        (lambda g: g._allgather_base(ones(15), ones(8)), "2 ranks with 8 values each have 16, and the whole has 15"),
        (lambda g: g.allgather([[ones()]], [ones()]), "wants a list of 2 tensors, got 1"),
        (lambda g: g.allgather([[ones(), ones(7)]] * 1, [ones(3)]), "this rank's tensor has 3 values"),
        (lambda g: g.allgather([[ones().int(), ones()]], [ones()]), "tensors of one dtype"),
        (lambda g: g.alltoall_base(ones(4), ones(4), [1, 2], [2, 2]), r"splits \[1, 2\] are not 2 that make 4 rows"),
        (lambda g: g.alltoall_base(ones(5), ones(5), [], []), "5 rows cannot be split evenly between 2 ranks"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_sent(call: Any, message: str) -> None:
    with groups(2) as (a, b):
        with pytest.raises(ValueError, match=message):
            call(a)
        each([a, b], lambda g: g.barrier().wait())


@pytest.mark.parametrize(
    ("op", "dtype", "message"),
    [
        (dist.ReduceOp.BAND, torch.float32, "a bitwise and is of whole numbers"),
        (dist.ReduceOp.AVG, torch.int32, "an average is of floating-point numbers"),
        (dist.ReduceOp.MAX, torch.complex64, "complex64 has no maximum"),
        (dist.ReduceOp.PREMUL_SUM, torch.float32, "has no"),
    ],
)
def test_an_operation_that_there_is_not_is_refused(op: Any, dtype: torch.dtype, message: str) -> None:
    options = types.SimpleNamespace(reduceOp=op)
    with groups(1) as (a,), pytest.raises(ValueError, match=message):
        a.allreduce([torch.ones(3, dtype=dtype)], options)


def test_a_rank_that_never_comes_to_make_the_group_is_named() -> None:
    store = new_store()
    rendezvous.say(store, "k", World(1, 3), "here")
    with pytest.raises(PeerLost, match=r"rank 1 waited 0\.2 s, and ranks 0, 2 of 3 did not come"):
        rendezvous.hear(store, "k", World(1, 3), 0.2)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_goes_before_it_has_measured_the_line_is_named_and_not_waited_for(gone: int) -> None:
    store, world = DeadlineStore(new_store(), ENDLESS_S), [World(rank, 3) for rank in range(3)]

    def opened(rank: int) -> ZeroMQ:
        endpoint = rendezvous.opener(store, "k", world[rank], Options(), ENDLESS_S)("job")
        rendezvous.introduce(store, "k/at", world[rank], endpoint)
        for peer in {0, 1, 2} - {rank}:
            rendezvous.connect(store, "k/at", peer, endpoint, ENDLESS_S)
        return endpoint

    def call(rank: int) -> str:
        if rank == gone:
            ends[rank].abort("by chance")
            return ""
        return said(lambda: rendezvous.measure(store, "k", world[rank], ends[rank], ENDLESS_S))

    ends = each(range(3), opened)
    words = each(range(3), call)
    for endpoint in ends:
        endpoint.abort("over")
    assert words[2].startswith(
        "PeerLost: rank 2 waited up to 600 s, and ranks 0 and 1 of 3 have not measured their line"
    )
    assert f"rank {gone} gave up: by chance" in words[2]
    assert f"rank {gone} gave up: by chance" in words[1 - gone]


def test_parts_larger_than_the_window_pass_each_other() -> None:
    n = 1 << 20

    def call(group: ZmqGroup) -> None:
        rank = group.rank()
        outs = [torch.empty(n) for _ in range(3)]
        group.alltoall(outs, [torch.full((n,), 10.0 * rank + p) for p in range(3)]).wait()
        assert all(out.eq(10 * p + rank).all() for p, out in enumerate(outs))
        group.allreduce([x := ones(n)]).wait()
        assert x.eq(3).all()
        group.allgather([outs], [x]).wait()
        assert all(out.eq(3).all() for out in outs)

    with groups(3, options=[Options(window=1 << 20)] * 3) as ranks:
        for group in ranks:
            group._place = dataclasses.replace(group._place, piece=1 << 18)
        each(ranks, call)


def test_a_call_that_says_it_is_waited_for_is_carried_out_even_if_nobody_waits() -> None:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    with groups(2) as ranks:
        futures = [group.allreduce([ones()], options).get_future() for group in ranks]
        assert all(future.wait()[0].eq(2).all() for future in futures)


def test_calls_are_carried_out_in_the_order_made_whoever_waits_for_which() -> None:
    def call(group: ZmqGroup) -> None:
        tensors = [torch.full((4,), float(i)) for i in range(30)]
        works = [group.allreduce([t]) for t in tensors]
        order = list(range(30))
        random.Random(group.rank()).shuffle(order)
        each(order[:10], lambda i: works[i].wait())
        for i in order:
            works[i].wait()
        for i, t in enumerate(tensors):
            assert t.eq(3 * i).all()

    with groups(3) as ranks:
        each(ranks, call)


def failed(behind: int) -> list[str]:
    """What a rank's calls fail with that are behind one that its peer does not make, and then a later one."""
    with groups(2) as (a, b):
        works = [a.allreduce([ones()]) for _ in range(1 + behind)]
        patience = datetime.timedelta(seconds=15)  # none is left to wait for nothing
        each([lambda: works[0].wait(), lambda: b.barrier().wait()], lambda call: said(call))
        words = [said(functools.partial(work.wait, patience)) for work in works]
        words.append(said(lambda: a.allreduce([ones()]).wait()))
        a.shutdown()
        return [*words, said(lambda: a.allreduce([ones()]).wait())]


def test_all_calls_behind_one_that_failed_fail_for_its_reason_even_once_the_group_is_gone() -> None:
    first, *others = failed(behind=3)
    assert "(group 'test', call 1, all_reduce(8 × float32, sum), 60 s; " in first
    assert others == [first] * 5
