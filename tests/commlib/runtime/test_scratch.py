"""A thread's memory for a moment."""

from __future__ import annotations

import threading

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from commlib.runtime.scratch import _held, scratch

CPU = torch.device("cpu")


def test_it_is_one_for_all_shapes_that_fit() -> None:
    large = scratch("test", (10, 20), torch.float32, CPU)
    assert scratch("test", (4,), torch.float32, CPU).data_ptr() == large.data_ptr()
    assert scratch("test", (0, 3), torch.float32, CPU).shape == (0, 3)
    assert scratch("test", (), torch.float32, CPU).shape == ()


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
