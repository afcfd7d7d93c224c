"""A thread's memory for a moment."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from commlib.runtime import scratch as module
from commlib.runtime.scratch import _held, scratch

CPU = torch.device("cpu")


def test_it_is_one_for_all_shapes_that_fit() -> None:
    large = scratch("test", (10, 20), torch.float32, CPU)
    assert scratch("test", (4,), torch.float32, CPU).data_ptr() == large.data_ptr()
    assert scratch("test", (0, 3), torch.float32, CPU).shape == (0, 3)
    assert scratch("test", (), torch.float32, CPU).shape == ()


def test_once_it_has_grown_all_shapes_are_of_the_larger_and_the_smaller_is_given_back() -> None:
    small = scratch("growing", (4,), torch.float32, CPU)
    gone = weakref.ref(small.untyped_storage())
    large = scratch("growing", (400,), torch.float32, CPU)
    assert scratch("growing", (4,), torch.float32, CPU).data_ptr() == large.data_ptr()
    del small
    assert gone() is None


def test_of_ever_new_shapes_only_so_many_are_kept() -> None:
    for n in range(3 * module._VIEWS):
        assert scratch("ever new", (n,), torch.uint8, CPU).shape == (n,)
    assert len(_held.views) <= module._VIEWS


def test_purposes_dtypes_and_threads_do_not_share_it() -> None:
    mine = scratch("test", (8,), torch.float32, CPU).fill_(1)
    scratch("other", (8,), torch.float32, CPU).fill_(2)
    scratch("test", (8,), torch.int32, CPU).fill_(3)
    thread = threading.Thread(target=lambda: scratch("test", (8,), torch.float32, CPU).fill_(4))
    thread.start()
    thread.join()
    assert mine.tolist() == [1.0] * 8


def test_a_mode_has_tensors_of_its_own_kind_and_leaves_none() -> None:
    mine = scratch("test", (8,), torch.float32, CPU)
    with FakeTensorMode():
        assert isinstance(scratch("test", (8,), torch.float32, CPU), FakeTensor)
        assert isinstance(scratch("new", (8,), torch.float32, CPU), FakeTensor)
    assert scratch("test", (8,), torch.float32, CPU).data_ptr() == mine.data_ptr()
    assert not isinstance(scratch("new", (8,), torch.float32, CPU), FakeTensor)


def test_other_devices_have_an_allocator_that_knows_of_streams() -> None:
    meta = torch.device("meta")
    scratch("test", (8,), torch.float32, meta)
    assert ("test", torch.float32, meta) not in _held.tensors


def test_memory_that_was_freed_goes_back_where_the_c_library_can_do_that(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def trim(pad: int) -> int:
        asked.append(pad)
        return 1

    monkeypatch.setattr(module, "_malloc_trim", lambda: trim)
    module.give_back()
    assert asked == [0]
    monkeypatch.setattr(module, "_malloc_trim", lambda: None)
    module.give_back()
    assert asked == [0]


def test_a_c_library_without_such_a_call_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: object) -> object:
        raise TypeError("bad argument type for built-in operation")

    monkeypatch.setattr("ctypes.CDLL", none)
    assert module._malloc_trim.__wrapped__() is None
