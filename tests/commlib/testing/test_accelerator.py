"""The simulated accelerator finds each use that streams do not order, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.runtime import streams
from commlib.runtime.streams import CopyStream, Readback
from commlib.testing.accelerator import SimulatedAccelerator, StreamRace

CPU = torch.device("cpu")


@pytest.fixture
def gpu() -> Iterator[SimulatedAccelerator]:
    with SimulatedAccelerator() as it:
        yield it


def test_a_read_on_another_stream_is_a_race_that_names_tensor_operator_and_streams(gpu: SimulatedAccelerator) -> None:
    x, side = torch.zeros(5, 7), gpu.stream(CPU, "side stream")
    x.add_(1)
    with gpu.use(side), pytest.raises(StreamRace) as e:
        x.sum()
    said = str(e.value)
    assert "shape (5, 7)" in said
    assert "sum" in said
    assert "add_" in said
    assert "side stream" in said
    assert "default stream" in said
    assert "test_accelerator.py" in said


def test_it_is_none_behind_the_other_stream_or_an_event_or_what_the_host_has_waited_for(
    gpu: SimulatedAccelerator,
) -> None:
    x = torch.zeros(5)
    for order in range(3):
        side = gpu.stream(CPU)
        x.add_(1)
        if order == 0:
            side.wait_stream(gpu.current())
        elif order == 1:
            side.wait_event(gpu.current().record_event())
        else:
            gpu.wait(CPU)
        with gpu.use(side):
            x.sum()
        gpu.current().wait_stream(side)
    assert len(gpu.waits) == 1


def test_what_is_given_after_an_event_is_not_behind_it(gpu: SimulatedAccelerator) -> None:
    x, side = torch.zeros(5), gpu.stream(CPU)
    event = gpu.current().record_event()
    x.add_(1)
    side.wait_event(event)
    with gpu.use(side), pytest.raises(StreamRace, match="reads"):
        x.sum()


def test_writing_what_another_stream_still_reads_is_a_race_and_two_reads_are_none(gpu: SimulatedAccelerator) -> None:
    x, side = torch.zeros(5), gpu.stream(CPU)
    side.wait_stream(gpu.current())
    with gpu.use(side):
        x.sum()
    x.sum()
    with pytest.raises(StreamRace, match=r"writes .* read it"):
        x.mul_(2)


def test_parts_of_a_tensor_that_do_not_meet_are_no_race(gpu: SimulatedAccelerator) -> None:
    x, side = torch.zeros(4, 8), gpu.stream(CPU)
    side.wait_stream(gpu.current())
    with gpu.use(side):
        x[:2].add_(1)
    x[2:].add_(1)
    with pytest.raises(StreamRace):
        x[1:].add_(1)


def test_views_and_shapes_are_no_use(gpu: SimulatedAccelerator) -> None:
    x, side = torch.zeros(4, 8), gpu.stream(CPU)
    with gpu.use(side):
        x.view(-1)[3:].t().detach()
        assert x.numel() == 32


def test_memory_that_is_freed_while_another_stream_uses_it_is_a_race_unless_recorded(gpu: SimulatedAccelerator) -> None:
    side = gpu.stream(CPU)
    for kept in (True, False):
        x = torch.zeros(5)
        side.wait_stream(gpu.current())
        with gpu.use(side):
            y = x + 1
        if kept:
            gpu.keep(x, side)
        del x
        if kept:
            torch.zeros(1)
    with pytest.raises(StreamRace, match="record_stream"):
        torch.zeros(1)
    assert len(y) == 5


def test_memory_may_be_freed_once_its_stream_is_behind_the_use(gpu: SimulatedAccelerator) -> None:
    x, side = torch.zeros(5), gpu.stream(CPU)
    side.wait_stream(gpu.current())
    with gpu.use(side):
        y = x + 1
    gpu.current().wait_stream(side)
    del x
    assert float(y.sum()) == 5


def test_the_host_waits_where_it_asks_for_a_value_and_each_time_is_counted_with_its_place(
    gpu: SimulatedAccelerator,
) -> None:
    x = torch.ones(3)
    assert x.sum().item() == 3
    assert x.tolist() == [1, 1, 1]
    assert len(gpu.waits) == 2
    assert all("test_accelerator.py" in why for why in gpu.waits)


def test_a_value_read_back_a_step_later_makes_nobody_wait(gpu: SimulatedAccelerator) -> None:
    back = Readback()
    for i in range(3):
        back.start(torch.full((2,), float(i)))
        assert back.get() == [i, i]
    assert gpu.waits == []


def test_pinned_memory_that_is_read_before_its_copy_is_done_is_a_race(gpu: SimulatedAccelerator) -> None:
    x, there = torch.ones(3), gpu.pinned((3,), torch.float32)
    there.copy_(x, non_blocking=True)
    with pytest.raises(StreamRace, match="the host"):
        there.tolist()


def test_a_copy_that_blocks_is_counted(gpu: SimulatedAccelerator) -> None:
    gpu.pinned((3,), torch.float32).copy_(torch.ones(3))
    assert len(gpu.waits) == 1


@pytest.mark.parametrize("ordered", [True, False])
def test_copies_of_a_copy_stream_are_behind_what_they_are_told_to_be(gpu: SimulatedAccelerator, ordered: bool) -> None:
    lane, x = CopyStream(CPU), torch.ones(3)
    there = streams.host(3, torch.float32, CPU)
    if ordered:
        lane.copy(there, x, lane.now()).wait()
        assert there.tolist() == [1, 1, 1]
    else:
        with pytest.raises(StreamRace):
            lane.copy(there, x)
    assert gpu.waits == []


@pytest.mark.parametrize("joins", [True, False])
def test_a_future_orders_who_joins_it(gpu: SimulatedAccelerator, joins: bool) -> None:
    x, side, done = torch.zeros(3), gpu.stream(CPU), streams.future(CPU)
    side.wait_stream(gpu.current())
    with gpu.use(side):
        x.add_(1)
        streams.complete(done, x, CPU)
    if joins:
        streams.joined(done)
        x.sum()
    else:
        with pytest.raises(StreamRace):
            x.sum()


def test_what_a_backward_pass_does_and_what_other_threads_do_is_seen(gpu: SimulatedAccelerator) -> None:
    x, side = torch.ones(3, requires_grad=True), gpu.stream(CPU, "theirs")
    (2 * x).sum().backward()
    assert x.grad is not None
    seen: list[BaseException] = []

    def read() -> None:
        try:
            with gpu.use(side):
                x.grad.sum()  # type: ignore[union-attr]
        except StreamRace as e:
            seen.append(e)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert "theirs" in str(seen[0])


def test_who_does_what_is_ordered_behind_another_threads_work_waits_for_it_and_nobody_else_does(
    gpu: SimulatedAccelerator,
) -> None:
    x, y, side, slow = torch.zeros(5), torch.zeros(5), gpu.stream(CPU), Future[None]()
    before = gpu.event(timing=True)
    before.record()
    side.wait_stream(gpu.current())
    with gpu.use(side):
        gpu.ran([], [x], "something slow")
        gpu.later(slow)
        after = side.record_event()
    began = threading.Event()

    def finish() -> None:
        began.wait()
        x.fill_(3)
        slow.set_result(None)

    thread = threading.Thread(target=finish)
    thread.start()
    y.add_(1)  # not behind it: goes on
    gpu.current().wait_event(after)  # nor does an order make the host wait
    assert not slow.done()
    noted = time.perf_counter()
    began.set()
    assert (x + y).tolist() == [4] * 5
    thread.join()
    assert after.at_s >= noted
    assert before.elapsed_time(after) == pytest.approx(1e3 * (after.at_s - before.at_s))


def test_outside_nothing_is_simulated() -> None:
    with SimulatedAccelerator() as gpu:
        assert streams.accelerator(CPU) is gpu
    assert streams.accelerator(CPU) is None
    seen = gpu.operations
    torch.zeros(3).add_(1)
    assert gpu.operations == seen


Step = tuple[str, int, int]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["read", "write", "order"]), st.integers(0, 2), st.integers(0, 2)), max_size=25)
)
def test_it_is_a_race_exactly_where_no_path_of_orders_leads(steps: list[Step]) -> None:
    """The oracle: operations and orders as a graph, and which ones can be reached from which."""
    behind: list[set[int]] = []  # operation → those that it is behind, itself included
    last: list[set[int]] = [set(), set(), set()]  # stream → what its next operation is behind
    uses: list[tuple[int, int, bool]] = []  # (operation, tensor, writes)
    expected = False
    with SimulatedAccelerator() as gpu:
        tensors = [torch.zeros(2) for _ in range(3)]
        gpu.wait(CPU)
        lanes = [gpu.stream(CPU) for _ in range(3)]
        try:
            for what, a, b in steps:
                if what == "order":
                    lanes[a].wait_stream(lanes[b])
                    last[a] |= last[b]
                    continue
                mine, writes = set(last[a]), what == "write"
                expected = any(t == b and (writes or wrote) and number not in mine for number, t, wrote in uses)
                behind.append(mine | {len(behind)})
                uses.append((len(behind) - 1, b, writes))
                last[a] = behind[-1]
                with gpu.use(lanes[a]):
                    if writes:
                        tensors[b].add_(1)
                    else:
                        tensors[b].is_same_size(tensors[b])
                        torch.sum(tensors[b])
                if expected:
                    break
            raced = False
        except StreamRace:
            raced = True
    assert raced == expected
