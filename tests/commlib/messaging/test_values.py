"""Values as bytes: they come back as they were, and bytes that only claim to be values are refused."""

from __future__ import annotations

import pickle
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlib.messaging import values
from commlib.messaging.frame import DTYPES
from commlib.messaging.values import Unreadable

DTYPES_HERE = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = torch.arange(draw(st.integers(0, 9)), draw(st.integers(10, 90)), dtype=torch.float32)
    made = made[: torch.Size(shape).numel()] if len(made) >= torch.Size(shape).numel() else torch.ones(shape)
    return made.reshape(shape).to(draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool])))


plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(allow_nan=False), st.text(), tensors()
)
nested = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=4),
    max_leaves=12,
)


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and bool(a == b)


def sent(**named: Any) -> tuple[bytes, memoryview]:
    head, rows = values.pack(named)
    return head, memoryview(b"".join(rows))


@given(one=nested, other=nested)
def test_they_come_back_as_they_were(one: Any, other: Any) -> None:
    assert alike(values.unpack(*sent(one=one, other=other)), [one, other])


def test_a_tensor_that_comes_back_has_memory_of_its_own_and_may_be_written() -> None:
    head, tensors_ = sent(x=torch.arange(4.0))
    (x,) = values.unpack(head, tensors_)
    x += 1
    (again,) = values.unpack(head, tensors_)
    assert again.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"state\['a'\]\[1\] cannot be saved: object"),
        (1 << 64, "is no number of up to 64 bits"),
        (b"bytes", "bytes b'bytes' is no number"),
        (torch.eye(2).to_sparse(), "is no number of up to 64 bits, text, dense tensor"),
        ({1.5: 1}, "dict {1.5: 1} is no"),
    ],
)
def test_what_cannot_be_packed_is_named_with_its_place(value: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        values.pack({"state": {"a": [0, value]}})


def claim(dtype: object, shape: object) -> bytes:
    made: bytes = msgpack.packb([msgpack.ExtType(1, msgpack.packb([dtype, shape]))])
    return made


@pytest.mark.parametrize(
    ("head", "tensors_", "said"),
    [
        (claim("float32", [1 << 40]), b"", "a tensor has 4398046511104 bytes, of which 0 are there"),
        (claim("float32", [-1]), b"", "dtype or shape is none"),
        (claim("float32", [1.5]), b"", "dtype or shape is none"),
        (claim("system", [1]), b"1234", "dtype or shape is none"),
        (msgpack.packb([msgpack.ExtType(2, b"")]), b"", "incomplete input"),
        (claim("float32", [1]), b"12345678", "there are 4 bytes that no tensor needs"),
        (msgpack.packb({"a": 1}), b"", "it is no list of values"),
        (msgpack.packb([1])[:-1], b"", ":"),
        (b"", b"", ":"),
        (b"\xdd\xff\xff\xff\xff", b"", "max_array_len"),
        (b"\x91" * 3000 + b"\x01", b"", "it nests deeper than 64 levels"),
        (pickle.dumps([1]), b"", ":"),
    ],
)
def test_bytes_that_only_claim_to_be_values_are_refused(head: bytes, tensors_: bytes, said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        values.unpack(head, memoryview(tensors_))


@given(head=st.binary(max_size=80), tensors_=st.binary(max_size=40))
def test_whatever_comes_is_a_list_of_values_or_an_error(head: bytes, tensors_: bytes) -> None:
    try:
        found = values.unpack(head, memoryview(tensors_))
    except Unreadable:
        return
    assert isinstance(found, list)
